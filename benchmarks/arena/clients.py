"""Clients of a run: they send requests, leave, come back after refusals, and keep the times."""

import heapq
import itertools
import random
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable

from benchmarks.arena.case import Case, Source
from benchmarks.arena.outcome import Retries, Served
from benchmarks.arena.service import Service
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.step_record import StepRecord
from legato.core.token_ids import token_array

_IMPATIENT_S = 0.5
"""When an impatient client comes back; it ignores the time in the refusal."""
_ROUNDING = 1e-9


class _Sent:
    """A request of a client, sent once or again.

    Attributes:
        sent_s: when it was sent, for the last time.
        advanced_s: when it was admitted, or last advanced; None before.
    """

    __slots__ = (
        "admitted",
        "advanced_s",
        "client",
        "is_over",
        "is_refused",
        "num_out",
        "num_preempted",
        "num_prompt",
        "request_id",
        "sent_s",
        "source",
        "still_s",
        "times_s",
    )

    def __init__(self, source: Source, client: int, sizes: tuple[int, int]) -> None:
        self.source = source
        self.client = client
        self.sent_s = 0.0
        self.num_prompt, self.num_out = sizes
        self.request_id = ""
        self.times_s: list[float] = []
        self.advanced_s: float | None = None
        self.still_s = 0.0
        self.num_preempted = 0
        self.is_over = self.is_refused = False


class Clients:
    """All clients of a case."""

    def __init__(self, case: Case, classes: dict[str, SloClass], service: Service) -> None:
        self._case = case
        self._classes = classes
        self._service = service
        self._random = random.Random(case.seed)
        self._ids = itertools.count()
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Sent]] = []  # a heap
        self._open: dict[str, _Sent] = {}  # key request id
        self._leaving: list[str] = []  # request ids
        self.all: list[_Sent] = []
        self.tenant_of: dict[str, tuple[str, bool]] = {}
        self._refused: list[tuple[str, float, float]] = []  # source, when, stated
        self._num_left = {s.name: s.count for s in case.sources if not s.num_clients}
        for source in case.sources:
            for client in range(source.num_clients):
                self._begin(source, client, source.start_s)
            if not source.num_clients:
                for number in range(source.count):
                    self._begin(source, number, source.start_s + number * source.every_s)

    @property
    def next_s(self) -> float | None:
        """When the next request is due."""
        return self._due[0][0] if self._due else None

    @property
    def next_due_s(self) -> float:
        """When the first promised token of a stream is due; 0 if none is."""
        due_s = (
            sent.times_s[-1] + itl_s
            for sent in self._open.values()
            if sent.times_s and (itl_s := self.slo(sent.source).itl_s) is not None
        )
        return min(due_s, default=0.0)

    @property
    def is_over(self) -> bool:
        """Whether the run may end."""
        return bool(self._case.until) and not self._num_left[self._case.until]

    def events(self, now_s: float) -> list[Event]:
        """Return what clients have sent until now."""
        events: list[Event] = [AbortRequest(request_id=name) for name in self._leaving]
        self._leaving = []
        while self._due and self._due[0][0] <= now_s:
            at_s, _, sent = heapq.heappop(self._due)
            events.append(self._message(sent, at_s))
        return events

    def receive(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """Take the outputs of a step."""
        for output in outputs:
            sent = self._open.get(output.request_id)
            if sent is None:
                continue
            sent.times_s += [now_s] * bool(output.new_token_ids)
            if output.finish_reason is FinishReason.REFUSED:
                self._refuse(sent, output.retry_after_s, now_s)
            elif output.finish_reason is not None:
                self._end(sent, now_s)
            elif len(sent.times_s) >= sent.num_out:
                self._leaving.append(output.request_id)
                self._end(sent, now_s)

    def note(self, step: StepRecord) -> None:
        """Note which requests advanced."""
        for name in step.admitted:
            sent = self._open.get(name)
            if sent is not None and sent.advanced_s is None:
                sent.advanced_s = step.planned_s
        for name in step.preempted:
            if name in self._open:
                self._open[name].num_preempted += 1
        for chunk in step.chunks:
            sent = self._open.get(chunk.request_id)
            if sent is None or not chunk.num_tokens:
                continue
            if sent.advanced_s is not None and step.ended_s - sent.advanced_s > sent.still_s:
                sent.still_s = step.ended_s - sent.advanced_s
            sent.advanced_s = step.ended_s

    def stop(self, now_s: float) -> None:
        """End the run: what was not admitted or did not advance has waited until now."""
        for sent in self._open.values():
            if sent.advanced_s is not None:
                sent.still_s = max(sent.still_s, now_s - sent.advanced_s)

    def served(self, now_s: float) -> dict[str, Served]:
        """Return what each source's clients got; key its name."""
        by: dict[str, list[_Sent]] = {source.name: [] for source in self._case.sources}
        for sent in self.all:
            by[sent.source.name].append(sent)
        return {name: self._sum(name, requests, now_s) for name, requests in by.items()}

    def retries(self, now_s: float) -> Retries:
        """Compare the times in refusals with the truth."""
        accepted: defaultdict[str, list[float]] = defaultdict(list)  # key source
        for sent in self.all:
            if not sent.is_refused:
                insort(accepted[sent.source.name], sent.sent_s)
        pairs = []
        for name, at_s, stated_s in self._refused:
            place = bisect_right(accepted[name], at_s)
            next_s = accepted[name][place] if place < len(accepted[name]) else None
            pairs.append((stated_s, (now_s if next_s is None else next_s) - at_s, next_s is None))
        return Retries.of(pairs)

    def wait_s(self, sent: _Sent, now_s: float) -> float:
        """Return how long a request waited for its first token, up to now."""
        return (sent.times_s[0] if sent.times_s else now_s) - sent.sent_s

    def slo(self, source: Source) -> SloClass:
        return self._classes[source.slo_class]

    def _begin(self, source: Source, client: int, at_s: float) -> None:
        draw, spread = self._random.uniform, source.spread
        sizes = [
            max(1, round(mean * draw(1.0 - spread, 1.0 + spread)))
            for mean in (source.num_prompt_tokens, source.num_output_tokens)
        ]
        sent = _Sent(source, client, (sizes[0], sizes[1]))
        heapq.heappush(self._due, (at_s, next(self._order), sent))

    def _message(self, sent: _Sent, at_s: float) -> AddRequest:
        number, source = next(self._ids), sent.source
        if not sent.request_id:
            self.all.append(sent)
        sent.request_id, sent.sent_s, sent.is_refused = f"{source.name}-{number}", at_s, False
        is_best_effort = self.slo(source).is_best_effort
        self._open[sent.request_id] = sent
        self.tenant_of[sent.request_id] = source.tenant, is_best_effort
        self._service.come(source.tenant, at_s, best_effort=is_best_effort)
        return AddRequest(
            request_id=sent.request_id,
            prompt_token_ids=token_array((number,)) * sent.num_prompt,
            params=SamplingParams(
                temperature=0.0, seed=0, max_tokens=source.max_tokens or sent.num_out
            ),
            service=ServiceParams(slo_class=source.slo_class, tenant=source.tenant),
            arrival_time_s=at_s,
        )

    def _refuse(self, sent: _Sent, stated_s: float | None, now_s: float) -> None:
        self._refused.append((sent.source.name, now_s, stated_s or 0.0))
        self._leave(sent, now_s)
        sent.is_refused = True
        if sent.source.num_clients:
            again_s = _IMPATIENT_S if sent.client % 2 else max(_IMPATIENT_S, stated_s or 0.0)
            heapq.heappush(self._due, (now_s + again_s, next(self._order), sent))
        else:
            self._num_left[sent.source.name] -= 1

    def _end(self, sent: _Sent, now_s: float) -> None:
        self._leave(sent, now_s)
        sent.is_over = True
        if sent.source.num_clients:
            self._begin(sent.source, sent.client, now_s)
        else:
            self._num_left[sent.source.name] -= 1

    def _leave(self, sent: _Sent, now_s: float) -> None:
        del self._open[sent.request_id]
        tenant, is_best_effort = self.tenant_of[sent.request_id]
        self._service.go(tenant, now_s, best_effort=is_best_effort)

    def _sum(self, name: str, requests: list[_Sent], now_s: float) -> Served:
        stated = [stated_s for source, _, stated_s in self._refused if source == name]
        kept = [sent for sent in requests if not sent.is_refused]
        if not requests:
            return Served()
        slo = self.slo(requests[0].source)
        waits = sorted(self.wait_s(sent, now_s) for sent in kept)
        late = num_gaps = num_kept = num_in_time = num_judged = 0
        for sent in kept:
            gaps = [b - a for a, b in itertools.pairwise(sent.times_s)]
            num_late = 0 if slo.itl_s is None else sum(g > slo.itl_s + _ROUNDING for g in gaps)
            in_time = slo.ttft_s is None or self.wait_s(sent, now_s) <= slo.ttft_s + _ROUNDING
            late, num_gaps = late + num_late, num_gaps + len(gaps)
            is_judged = bool(sent.times_s) or not in_time
            num_judged += is_judged
            num_kept += (
                is_judged
                and in_time
                and num_late <= (1.0 - slo.itl_quantile) * len(gaps) + _ROUNDING
            )
            num_in_time += in_time and bool(sent.times_s)
        return Served(
            num=len(requests),
            num_refused=len(stated),
            first=sum(bool(sent.times_s) for sent in kept),
            in_time=num_in_time,
            longest_s=waits[-1] if waits else 0.0,
            least_s=waits[0] if waits else 0.0,
            median_s=waits[len(waits) // 2] if waits else 0.0,
            gaps=num_gaps,
            late=late,
            promised=0 if slo.is_best_effort else num_judged,
            kept=0 if slo.is_best_effort else num_kept,
            still_s=max((sent.still_s for sent in kept), default=0.0),
            tokens=sum(len(sent.times_s) for sent in requests),
            preempted=sum(sent.num_preempted for sent in requests),
            ended=sum(sent.is_over for sent in requests),
            retry_least_s=min(stated, default=0.0),
            retry_most_s=max(stated, default=0.0),
        )
