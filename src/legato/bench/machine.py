"""A machine as a recorded run shows it, to be simulated as it is.

What its steps take is fitted to steps that ran beside the HTTP server and its clients; what the
scheduler believes of them is what a calibration of the idle engine told it, as on the machine.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from legato.bench.delays import Delays
from legato.bench.simulation import simulated_engine
from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.plan import StepPlan
from legato.engine.calibration_file import shape_counts, shape_of
from legato.engine.core import EngineCore
from legato.executor.simulated import VirtualClock
from legato.scheduler.cost_fit import MeasuredStep, fit
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape

_NUM_QUANTILES = 201


class StepErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantiles of measured over fitted durations, in steps of equal probability.

    Attributes:
        decodes: of steps without prefill, which are short, so that a hiccup is a larger part.
        prefills: of all others.
    """

    decodes: tuple[float, ...] = (1.0,)
    prefills: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, steps: Sequence[MeasuredStep], costs: StepCosts) -> "StepErrors":
        """Where one kind of step is missing, it is as the other."""
        ratios: dict[bool, list[float]] = {False: [], True: []}  # key: whether it has prefill
        for shape, seconds in steps:
            ratios[shape.num_prefill_chunks > 0].append(seconds / costs.seconds(shape))
        return cls(
            decodes=_quantiles(ratios[False] or ratios[True]),
            prefills=_quantiles(ratios[True] or ratios[False]),
        )

    def draw(self, shape: StepShape, rng: random.Random) -> float:
        """What a step of this shape is off by, another each time."""
        return self.quantile(shape, rng.random())

    def quantile(self, shape: StepShape, probability: float) -> float:
        """What a fraction `probability` of such steps is off by at most."""
        quantiles = self.prefills if shape.num_prefill_chunks else self.decodes
        place = probability * (len(quantiles) - 1)
        below = int(place)
        above = min(below + 1, len(quantiles) - 1)
        return quantiles[below] + (place - below) * (quantiles[above] - quantiles[below])


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a machine, with its server and clients.

    Attributes:
        calibration: steps of the idle engine: each shape's counts, by their name, and its seconds.
        costs, errors: of steps beside the server and its clients.
        max_model_len: longest prompt plus output in tokens.
        kv_cache_tokens: whose keys and values fit into the memory.
    """

    calibration: list[tuple[dict[str, float], float]]
    costs: StepCosts
    errors: StepErrors = StepErrors()
    delays: Delays = Delays()
    max_model_len: int
    kv_cache_tokens: int

    @classmethod
    def fit(
        cls,
        calibration: Sequence[MeasuredStep],
        recorded: Sequence[MeasuredStep],
        *,
        delays: Delays,
        max_model_len: int,
        kv_cache_tokens: int,
    ) -> "Machine":
        """The machine on which these were measured.

        Recorded steps last what an SLO allows, over and over, so that they alone would not tell
        which part of them costs what: the costs are fitted to both.
        """
        costs = fit([*calibration, *recorded])
        return cls(
            calibration=[(shape_counts(shape), seconds) for shape, seconds in calibration],
            costs=costs,
            errors=StepErrors.of(recorded or calibration, costs),
            delays=delays,
            max_model_len=max_model_len,
            kv_cache_tokens=kv_cache_tokens,
        )

    @property
    def belief(self) -> list[MeasuredStep]:
        """What a scheduler on it begins with."""
        return [(shape_of(counts), seconds) for counts, seconds in self.calibration]


class MeasuredServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server on a measured machine, to be simulated.

    Attributes:
        seed: of how steps err.
    """

    machine: Machine
    scheduler: SchedulerConfig
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        return self.machine.max_model_len

    @property
    def delays(self) -> Delays:
        return self.machine.delays

    def start(self, clock: VirtualClock) -> EngineCore:
        """An engine that is calibrated as the machine's, at rest."""
        machine, rng = self.machine, random.Random(self.seed)

        def step_time_s(plan: StepPlan) -> float:
            shape = StepShape.of(plan)
            return machine.errors.draw(shape, rng) * machine.costs.seconds(shape)

        return simulated_engine(
            clock,
            self.scheduler,
            belief=machine.belief,
            step_time_s=step_time_s,
            max_model_len=machine.max_model_len,
            kv_cache_tokens=machine.kv_cache_tokens,
        )


def read_machine(path: Path) -> Machine:
    """Read what `write_machine` wrote.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        machine = msgspec.json.decode(path.read_bytes(), type=Machine)
        machine.belief  # noqa: B018
    except (OSError, msgspec.DecodeError, AttributeError) as error:
        raise ConfigError(f"cannot read {path} as a machine: {error}") from error
    return machine


def write_machine(path: Path, machine: Machine) -> None:
    """Write a machine as JSON, and the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(machine))


def _quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.quantile(ratios, np.linspace(0.0, 1.0, _NUM_QUANTILES)).tolist())
