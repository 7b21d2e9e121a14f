"""Runs a case: the engine's loop and scheduler on a virtual clock, and clients."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from benchmarks.arena.case import Case, Pause
from benchmarks.arena.clients import Clients
from benchmarks.arena.outcome import Outcome
from benchmarks.arena.service import Service
from legato.core.config import SchedulerConfig
from legato.core.plan import StepPlan
from legato.core.slo import SloClass
from legato.core.step_record import StepRecord
from legato.executor.simulated import VirtualClock
from legato_lab.simulation.profiled_server import Truth, calibrate
from legato_lab.simulation.simulated_run import simulated_engine

_MOST_STALLS = 20_000
_STALL_S = 1e-3
"""Longest time without a step while requests wait, and how far the clock goes on each time."""


def run(case: Case) -> Outcome:
    """Simulate a case."""
    return _Run(case).run()


class _Run:
    def __init__(self, case: Case) -> None:
        shape, known = case.shape, SchedulerConfig.__struct_fields__
        told = {name: value for name, value in case.settings.items() if name in known}
        config = SchedulerConfig(**_typed(told)).resolve(shape.max_model_len)
        assert config.max_num_seqs is not None
        self._case = case
        self._clock = VirtualClock()
        self._pauses = sorted(case.pauses, key=lambda pause: pause.at_s)
        self._service = Service(shape.costs, dict(config.tenant_weights))
        self._clients = Clients(case, config.classes, self._service)
        truth = Truth(shape.costs, error=shape.truth_error, noise=shape.noise, seed=case.seed)
        self._loop, self._kv = simulated_engine(
            self._clock,
            config,
            belief=calibrate(
                shape.costs,
                max_model_len=shape.max_model_len,
                max_num_seqs=config.max_num_seqs,
                noise=shape.noise,
                seed=case.seed,
            ),
            rows=shape.costs.rows,
            step_time_s=self._paused(truth.step_time_s),
            max_model_len=shape.max_model_len,
            kv_cache_tokens=shape.kv_cache_tokens,
            acceptance=None,
            is_sharing=False,
        )
        self._loop.set_recording(is_on=True)
        self._num_steps = self._num_tokens = 0
        self._num_free_blocks: list[int] = []
        self._is_stale = False

    def run(self) -> Outcome:
        error = ""
        try:
            self._serve()
        except Exception as raised:  # the run's figures so far are of interest all the more
            error = f"ended by {raised!r}"
        return self._outcome(error)

    def _serve(self) -> None:
        case, clock, clients, loop = self._case, self._clock, self._clients, self._loop
        num_stalls = 0
        while clock() < case.seconds and not clients.is_over and num_stalls < _MOST_STALLS:
            self._pause()
            if not loop.has_work and clients.next_s is not None and clients.next_s > clock():
                clock.advance_to(min(case.seconds, clients.next_s))
            events = clients.events(clock())
            if not events and not loop.has_work and clients.next_s is None:
                return
            clock.advance_to(clock() + case.shape.turnaround_s)
            begun_s = clock()
            outputs = loop.step(events)
            if clock() == begun_s and not outputs:
                num_stalls += 1
                clock.advance_to(clock() + _STALL_S)
            else:
                num_stalls = 0
            for record in loop.take_records():
                if isinstance(record, StepRecord):
                    self._note(record)
            clients.receive(outputs, clock())
        if num_stalls == _MOST_STALLS:
            raise RuntimeError("requests wait, but no step is planned")

    def _note(self, step: StepRecord) -> None:
        self._num_steps += 1
        self._num_tokens += sum(chunk.num_tokens for chunk in step.chunks)
        self._num_free_blocks.append(step.num_blocks - step.num_used_blocks)
        self._clients.note(step)
        self._service.add(step, self._clients.tenant_of)
        if step.preempted and self._case.stale_s is not None and not self._is_stale:
            self._is_stale = True
            _make_stale(self._loop, step, self._clock() - self._case.stale_s)

    def _pause(self) -> None:
        """Let time pass between two steps."""
        while self._pauses and not self._pauses[0].in_step and self._is_due(self._pauses[0]):
            pause = self._pauses.pop(0)
            if pause.seconds is None:
                self._clock.advance_to(self._clients.next_due_s)
            else:
                self._clock.advance_to(self._clock() + pause.seconds)

    def _paused(self, step_time_s: Callable[[StepPlan], float]) -> Callable[[StepPlan], float]:
        def paused_s(plan: StepPlan) -> float:
            seconds = step_time_s(plan)
            if self._pauses and self._pauses[0].in_step and self._is_due(self._pauses[0]):
                seconds += self._pauses.pop(0).seconds or 0.0
            return seconds

        return paused_s

    def _is_due(self, pause: Pause) -> bool:
        return self._clock() >= pause.at_s

    def _outcome(self, error: str) -> Outcome:
        now_s, clients, service = self._clock(), self._clients, self._service
        clients.stop(now_s)
        service.end(now_s)
        by_source = clients.served(now_s)
        answered = [sent for sent in clients.all if not sent.is_refused]
        longest = max(answered, key=lambda sent: clients.wait_s(sent, now_s), default=None)
        still = max(answered, key=lambda sent: sent.still_s, default=None)
        stats = self._loop.stats
        if stats.num_contained_errors:
            error = f"{error} {stats.num_contained_errors} errors contained".strip()
        free = sorted(self._num_free_blocks)
        return Outcome(
            name=self._case.name,
            seconds=now_s,
            num_steps=self._num_steps,
            first_s=clients.wait_s(longest, now_s) if longest else 0.0,
            first_who=longest.source.name if longest else "",
            is_open=longest is not None and not longest.times_s,
            still_s=still.still_s if still else 0.0,
            still_who=still.source.name if still else "",
            denied_s=service.denied_s,
            denied_who=service.denied_who,
            shares=service.shares,
            best_effort=service.best_effort,
            best_effort_prefill=service.best_effort_prefill,
            gaps=sum(s.gaps for s in by_source.values() if s.promised),
            late=sum(s.late for s in by_source.values()),
            promised=sum(s.promised for s in by_source.values()),
            kept=sum(s.kept for s in by_source.values()),
            refused=sum(s.num_refused for s in by_source.values()),
            preempted=stats.num_preemptions,
            retries=clients.retries(now_s),
            output_per_s=sum(s.tokens for s in by_source.values()) / max(now_s, 1e-9),
            tokens_per_s=self._num_tokens / max(now_s, 1e-9),
            num_free_blocks=free[len(free) // 2] if free else 0,
            by_source=by_source,
            error=error,
        )


def _typed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with classes of service, which JSON has as objects, as such."""
    classes = settings.get("slo_classes", {})
    return {**settings, "slo_classes": msgspec.convert(classes, dict[str, SloClass])}


def _make_stale(loop: object, step: StepRecord, since_s: float) -> None:
    """Set back when a preempted request was passed first, in versions that keep it."""
    with suppress(AttributeError):
        for name in step.preempted:
            request = loop._scheduler._queues.get(name)  # type: ignore[attr-defined]
            if hasattr(request, "passed_since_s"):
                request.passed_since_s = since_s
