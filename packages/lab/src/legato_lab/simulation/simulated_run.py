"""Serves a workload on a virtual clock, with the engine's own loop and scheduler.

Steps only advance the clock, so minutes pass in seconds. The same seed always gives the same run.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from legato.core.cache_config import BLOCK_SIZES
from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.plan import StepPlan
from legato.core.rows import RowCounts
from legato.core.stats import EngineStats
from legato.core.step_record import EngineRecord
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.transfers import Transfers
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel
from legato_lab.simulation.clients import Delays, SimulatedClients
from legato_lab.simulation.drafts import Acceptance, SimulatedDrafter
from legato_lab.simulation.record import OnProgress, RequestRecord, StopWhen
from legato_lab.simulation.tally import Tally
from legato_lab.simulation.workload import Workload

_STEPS_PER_LOOK = 256
_VOCAB_SIZE = 32_000

OnRecords = Callable[[list[EngineRecord]], None]
MakeTransfers = Callable[[KVCacheManager], Transfers]


class SimulatedEngine(NamedTuple):
    """An engine whose steps only advance a clock, and its cache."""

    loop: EngineLoop
    kv: KVCacheManager


class Simulable(Protocol):
    """A server that can be simulated.

    Attributes:
        max_model_len: longest prompt plus output in tokens.
        scheduler: as configured.
        enable_prefix_caching: whether prompts share cached blocks.
    """

    @property
    def scheduler(self) -> SchedulerConfig: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def enable_prefix_caching(self) -> bool: ...

    @property
    def delays(self) -> Delays: ...

    def start(self, clock: VirtualClock, *, is_sharing: bool) -> SimulatedEngine:
        """Start an idle, calibrated engine, with or without a prefix cache."""
        ...

    def sibling(self, place: int) -> "Simulable":
        """Return the same server on another machine; from place 1 on, its random numbers differ."""
        ...


def simulated_engine(
    clock: VirtualClock,
    config: SchedulerConfig,
    *,
    belief: Sequence[MeasuredStep],
    rows: RowCounts,
    step_time_s: Callable[[StepPlan], float],
    max_model_len: int,
    kv_cache_tokens: int,
    acceptance: Acceptance | None,
    is_sharing: bool,
    make_transfers: MakeTransfers | None = None,
) -> SimulatedEngine:
    """Build the engine's loop on a simulated executor.

    Args:
        belief: the calibration for the scheduler.
        rows: the row counts that batches are padded to.
        step_time_s: returns the true time of a step.
        acceptance: how often drafts are accepted; None drafts nothing.
        is_sharing: whether there is a prefix cache.
        make_transfers: what joins it to other engines; None where there are none.
    """
    block_size = BLOCK_SIZES["cpu"]
    num_blocks = -(-kv_cache_tokens // block_size)
    kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=is_sharing)
    resolved = config.resolve(max_model_len)
    assert resolved.num_steps_in_flight is not None
    executor = SimulatedExecutor(
        clock, step_time_s, vocab_size=_VOCAB_SIZE, depth=resolved.num_steps_in_flight
    )
    scheduler = Scheduler(
        resolved,
        max_model_len=max_model_len,
        kv=kv,
        step_time=StepTimeModel(belief, rows),
        drafters=() if acceptance is None else (SimulatedDrafter(acceptance, _VOCAB_SIZE),),
    )
    transfers = None if make_transfers is None else make_transfers(kv)
    return SimulatedEngine(EngineLoop(scheduler, kv, executor, clock, transfers=transfers), kv)


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a workload.

    Attributes:
        records: of the requests that were sent, by arrival; empty if they were tallied.
        duration_s: from the start of the run to its last step, on the virtual clock.
        stats: of the engine, at the end.
    """

    records: list[RequestRecord]
    duration_s: float
    num_steps: int
    stats: EngineStats

    @property
    def num_steps_over_budget(self) -> int:
        return self.stats.num_steps_over_budget

    @property
    def num_preemptions(self) -> int:
        return self.stats.num_preemptions


def simulate(
    server: Simulable,
    workload: Workload,
    on_progress: OnProgress | None = None,
    on_records: OnRecords | None = None,
    *,
    until_s: float = math.inf,
    stop_when: StopWhen | None = None,
    tally: Tally | None = None,
) -> SimulatedRun:
    """Serve a workload on a server that has just started.

    Args:
        on_progress: called at intervals.
        on_records: called with the records of each step, on the virtual clock.
        until_s: ends the run with the step that reaches this time. Requests in flight are then
            cancelled, and no more are sent.
        stop_when: likewise ends the run, once it returns true.
        tally: takes the records instead of the run, which may then be of any length; excludes
            `stop_when`, which reads them.

    Raises:
        ConfigError: a request names a class that the server does not know, or is too long.
    """
    check_servable(server, workload)
    clock = VirtualClock()
    # If the workload does not say what prompts share, a prefix cache would only take time.
    knows_prefixes = any(request.hash_ids for request in workload)
    engine, _ = server.start(clock, is_sharing=server.enable_prefix_caching and knows_prefixes)
    engine.set_recording(is_on=on_records is not None)
    clients = SimulatedClients(workload, server.delays, tally)
    num_steps, num_tokens = 0, 0
    while clock.now_s < until_s and (clients.next_arrival_s is not None or engine.has_work):
        if not engine.has_work and clients.next_arrival_s is not None:
            clock.advance_to(clients.next_arrival_s)
        # Requests that come from here until the step's end wait for the next step.
        events = clients.send(clock.now_s)
        clock.advance_to(clock.now_s + server.delays.turnaround(num_tokens))
        planned_s = clock.now_s
        outputs = engine.step(events)
        num_tokens = len(outputs)
        clients.receive(outputs, clock.now_s)
        if clock.now_s == planned_s and engine.has_work:
            raise RuntimeError(f"at {planned_s} s there is work, but no step")
        if on_records is not None:
            on_records(engine.take_records())
        num_steps += clock.now_s > planned_s
        if num_steps % _STEPS_PER_LOOK:
            continue
        if on_progress is not None:
            on_progress(clients.counts)
        if stop_when is not None and stop_when(clock.now_s, clients.records_as_sent()):
            break
    clients.cancel()
    assert not engine.stats.num_contained_errors, "the scheduler erred: see the log"
    return SimulatedRun(
        records=[] if tally is not None else clients.records(),
        duration_s=clock.now_s,
        num_steps=num_steps,
        stats=engine.stats,
    )


def check_servable(server: Simulable, workload: Workload) -> None:
    """Raises ConfigError if a server could never serve one of the requests."""
    classes, max_model_len = server.scheduler.classes, server.max_model_len
    for request in workload:
        if request.slo_class not in (None, *classes):
            raise ConfigError(
                f"the workload asks for class {request.slo_class!r}; classes are: "
                f"{', '.join(classes)}"
            )
        if request.num_prompt_tokens + request.num_output_tokens > max_model_len:
            raise ConfigError(f"{request} is longer than max_model_len {max_model_len}")
