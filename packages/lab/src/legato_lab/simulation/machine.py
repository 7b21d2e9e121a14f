"""A machine as a recorded run shows it, for simulation.

Its steps' costs are fitted to steps that ran beside the HTTP server and its clients; the
scheduler's belief comes from a calibration of the idle engine, as on the real machine.
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
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.drafts import Acceptance
from legato_lab.simulation.simulated_run import MakeTransfers, SimulatedEngine, simulated_engine
from legato_lab.simulation.step_errors import ErrorSampler, StepErrors


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine, with its server and clients.

    Attributes:
        belief: steps of the idle engine, with which a scheduler begins.
        costs, errors: of steps beside the server and its clients.
        max_model_len: longest prompt plus output in tokens.
        kv_cache_tokens: tokens whose keys and values fit into the memory.
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
        """Fit a machine to measurements.

        Recorded steps repeatedly take as long as an SLO allows, so they alone would not separate
        the costs of their parts: the costs are fitted to all steps.

        Args:
            larger: further steps of the idle engine, with more tokens than a calibration has; the
                scheduler does not get them.
            rows: the row counts that batches are padded to.
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
    """A server on a measured machine, for simulation.

    Attributes:
        acceptance: how often drafts are accepted; None drafts nothing.
        seed: for the errors of steps.
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
        """Start an idle engine with the machine's calibration."""
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
