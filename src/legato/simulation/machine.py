"""A machine as a recorded run shows it, to be simulated as it is.

What its steps take is fitted to steps that ran beside the HTTP server and its clients; what the
scheduler believes of them is what a calibration of the idle engine told it, as on the machine.
"""

from collections.abc import Sequence

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.plan import StepPlan
from legato.core.rows import CPU_ROWS, RowCounts
from legato.executor.simulated import VirtualClock
from legato.scheduler.cost_fit import MeasuredStep, fit
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.simulation.clients import Delays
from legato.simulation.drafts import Acceptance
from legato.simulation.run import MakeTransfers, SimulatedEngine, simulated_engine
from legato.simulation.step_errors import ErrorSampler, StepErrors


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine, with its server and clients.

    Attributes:
        belief: steps of the idle engine, which a scheduler on it begins with.
        costs, errors: of steps beside the server and its clients.
        max_model_len: longest prompt plus output in tokens.
        kv_cache_tokens: whose keys and values fit into the memory.
    """

    belief: list[MeasuredStep]
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
        rows: RowCounts = CPU_ROWS,
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
            rows: what batches are padded to.
        """
        costs = fit([*calibration, *larger, *recorded], rows)
        return cls(
            belief=list(calibration),
            costs=costs,
            errors=StepErrors.of(recorded or calibration, costs),
            delays=delays,
            max_model_len=max_model_len,
            kv_cache_tokens=kv_cache_tokens,
        )


class MeasuredServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server on a measured machine, to be simulated.

    Attributes:
        acceptance: how often drafts are right; None drafts nothing.
        seed: of how steps err.
    """

    machine: Machine
    scheduler: SchedulerConfig
    enable_prefix_caching: bool = True
    acceptance: Acceptance | None = None
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        return self.machine.max_model_len

    @property
    def delays(self) -> Delays:
        return self.machine.delays

    def sibling(self, place: int) -> "MeasuredServer":
        return msgspec.structs.replace(self, seed=self.seed + place)

    def start(
        self,
        clock: VirtualClock,
        *,
        is_sharing: bool,
        make_transfers: MakeTransfers | None = None,
    ) -> SimulatedEngine:
        """An engine that is calibrated as the machine's, at rest."""
        machine, errors = self.machine, ErrorSampler(self.machine.errors, self.seed)

        def step_time_s(plan: StepPlan) -> float:
            shape = StepShape.of(plan)
            return errors.draw(shape) * machine.costs.seconds(shape)

        return simulated_engine(
            clock,
            self.scheduler,
            belief=machine.belief,
            rows=machine.costs.rows,
            step_time_s=step_time_s,
            max_model_len=machine.max_model_len,
            kv_cache_tokens=machine.kv_cache_tokens,
            acceptance=self.acceptance,
            is_sharing=is_sharing,
            make_transfers=make_transfers,
        )
