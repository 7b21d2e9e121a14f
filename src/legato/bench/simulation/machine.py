"""A machine as a recorded run shows it, to be simulated as it is.

What its steps take is fitted to steps that ran beside the HTTP server and its clients; what the
scheduler believes of them is what a calibration of the idle engine told it, as on the machine.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from legato.bench.simulation.clients import Delays
from legato.bench.simulation.run import simulated_engine
from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.plan import StepPlan
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.startup.calibration_file import shape_counts, shape_of
from legato.executor.simulated import VirtualClock
from legato.scheduler.cost_fit import DISTURBED, MeasuredStep, fit
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape

_BLOCK = 32
"""Steps whose errors are drawn together."""


class StepErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured over fitted durations, in the order in which they were measured.

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
            decodes=tuple(ratios[False] or ratios[True]),
            prefills=tuple(ratios[True] or ratios[False]),
        )

    @property
    def disturbed(self) -> float:
        """Share of steps that were longer than the machine alone explains."""
        return float(np.mean(np.array(self.decodes + self.prefills) > DISTURBED))

    def quantile(self, shape: StepShape, probability: float) -> float:
        """What a fraction `probability` of such steps is off by at most."""
        return float(np.quantile(self.among(shape), probability))

    def among(self, shape: StepShape) -> tuple[float, ...]:
        """Those of the same kind of step."""
        return self.prefills if shape.num_prefill_chunks else self.decodes


class ErrorSampler:
    """Draws errors of steps in blocks (the moving block bootstrap, Künsch, 1989).

    What makes a machine slow lasts: slow steps come together, and hit few requests hard. Drawn one
    by one they would hit all requests a little.
    """

    def __init__(self, errors: StepErrors, seed: int) -> None:
        self._errors = errors
        self._random = random.Random(seed)
        self._blocks: dict[bool, Iterator[float]] = {}  # key: whether a step has prefill

    def draw(self, shape: StepShape) -> float:
        """What the next step, which is of this shape, is off by."""
        has_prefill = shape.num_prefill_chunks > 0
        while (error := next(self._blocks.get(has_prefill, iter(())), None)) is None:
            known = self._errors.among(shape)
            start = self._random.randrange(len(known))
            self._blocks[has_prefill] = iter(known[start : start + _BLOCK])
        return error


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
        larger: Sequence[MeasuredStep] = (),
        delays: Delays,
        max_model_len: int,
        kv_cache_tokens: int,
    ) -> "Machine":
        """The machine on which these were measured.

        Recorded steps last what an SLO allows, over and over, so that they alone would not tell
        which part of them costs what: the costs are fitted to all.

        Args:
            larger: further steps of the idle engine, of which a scheduler is not told: those with
                more tokens than a calibration goes up to.
        """
        costs = fit([*calibration, *larger, *recorded])
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
    enable_prefix_caching: bool = True
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        return self.machine.max_model_len

    @property
    def delays(self) -> Delays:
        return self.machine.delays

    def start(self, clock: VirtualClock, *, is_sharing: bool) -> EngineLoop:
        """An engine that is calibrated as the machine's, at rest."""
        machine, errors = self.machine, ErrorSampler(self.machine.errors, self.seed)

        def step_time_s(plan: StepPlan) -> float:
            shape = StepShape.of(plan)
            return errors.draw(shape) * machine.costs.seconds(shape)

        return simulated_engine(
            clock,
            self.scheduler,
            belief=machine.belief,
            step_time_s=step_time_s,
            max_model_len=machine.max_model_len,
            kv_cache_tokens=machine.kv_cache_tokens,
            is_sharing=is_sharing,
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
