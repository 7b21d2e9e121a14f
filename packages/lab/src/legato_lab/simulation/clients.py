"""The clients of a simulated engine, and the time that passes outside of steps."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, count

import msgspec
import numpy as np

from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import INTERACTIVE, ServiceParams
from legato.core.tenant import DEFAULT_TENANT
from legato.core.token_ids import TokenIds
from legato_lab.simulation.prompts import SimulatedPrompts
from legato_lab.simulation.record import RequestRecord, Status
from legato_lab.simulation.tally import Tally
from legato_lab.simulation.workload import Workload, WorkloadRequest

_STATUSES: dict[FinishReason, Status] = {
    FinishReason.LENGTH: "ok",
    FinishReason.REFUSED: "refused",
    FinishReason.ERROR: "error",
}


class Delays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time outside of steps, in seconds: a constant and an addition for each token.

    Attributes:
        turnaround_s, turnaround_token_s: between two steps; tokens sampled in the first count.
        intake_s, intake_token_s: from a request's due time until the scheduler sees it; tokens of
            its prompt count.
        delivery_s, delivery_token_s: from the end of a step to a client; tokens of the same step
            that are delivered before count.
    """

    turnaround_s: float = 0.0
    turnaround_token_s: float = 0.0
    intake_s: float = 0.0
    intake_token_s: float = 0.0
    delivery_s: float = 0.0
    delivery_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def turnaround(self, num_tokens: int) -> float:
        """Return the time after a step. Args: num_tokens: sampled in it."""
        return self.turnaround_s + num_tokens * self.turnaround_token_s

    def intake(self, request: WorkloadRequest) -> float:
        return self.intake_s + request.num_prompt_tokens * self.intake_token_s

    def delivery(self, num_before: int) -> float:
        """Return the time to deliver a token. Args: num_before: tokens of its step before it."""
        return self.delivery_s + num_before * self.delivery_token_s


NO_DELAYS = Delays()


class _Open(msgspec.Struct):
    """A request that was sent and has not ended.

    Attributes:
        place: in the workload.
        token_times_s, num_tokens: as in `RequestRecord`.
    """

    place: int
    message: AddRequest
    token_times_s: list[float] = []
    num_tokens: int = 0
    num_sent: int = 1


class SimulatedClients:
    """Sends each request when it is due, and records its tokens.

    Args:
        delays: on the way to the scheduler and back.
        tally: takes the records of ended requests; without one, all records are kept.
        max_retries: how often a refused request is sent again, after the time that the refusal
            says.

    Attributes:
        counts: of the requests that were sent; those in flight are "cancelled".
        num_retries: how often requests were sent again.
    """

    def __init__(
        self,
        workload: Workload,
        delays: Delays = NO_DELAYS,
        tally: Tally | None = None,
        *,
        max_retries: int = 0,
    ) -> None:
        self._workload = workload
        self._delays = delays
        self._tally = tally
        self._max_retries = max_retries
        arrivals_s = np.array([request.arrival_s + delays.intake(request) for request in workload])
        # A short prompt may overtake a long one on its way.
        self._places = np.argsort(arrivals_s, kind="stable")
        self._arrivals_s = arrivals_s[self._places]
        self._num_sent = 0
        self._next_s: float | None = None  # the next request to send for the first time
        self._retries: list[tuple[float, int, _Open]] = []  # a heap
        self._prompts = SimulatedPrompts()
        self._again = count(1)
        self._open: dict[str, _Open] = {}  # key: request id
        self._records: dict[int, RequestRecord] = {}  # key: place in the workload
        self.counts: Counter[Status] = Counter()
        self.num_retries = 0
        self._look_ahead()

    @property
    def next_arrival_s(self) -> float | None:
        if not self._retries:
            return self._next_s
        return min(self._retries[0][0], math.inf if self._next_s is None else self._next_s)

    def send(self, now_s: float) -> list[AddRequest]:
        """Return the requests that have arrived since the last call."""
        sent: list[AddRequest] = []
        while (arrival_s := self.next_arrival_s) is not None and arrival_s <= now_s:
            sent.append(self._send(arrival_s))
        return sent

    def request(self, request_id: str) -> WorkloadRequest:
        """Return the workload's request of a message in flight."""
        return self._workload[self._open[request_id].place]

    def message(self, request_id: str) -> AddRequest:
        """Return the message of a request in flight."""
        return self._open[request_id].message

    def begin_again(self, request_id: str) -> AddRequest | None:
        """Return a new message for running a request elsewhere.

        Returns:
            None if it was rerun before.
        """
        one = self._open[request_id]
        if one.message.is_rerun:
            return None
        del self._open[request_id]
        one.message = msgspec.structs.replace(
            one.message, request_id=self._another_id(one), is_rerun=True
        )
        self._open[one.message.request_id] = one
        return one.message

    def receive(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """Take the outputs of a step that ended at `now_s`."""
        is_alike = not self._delays.delivery_token_s
        received_s = round(now_s + self._delays.delivery_s, 6)
        for num_before, output in enumerate(outputs):
            if not is_alike:
                received_s = round(now_s + self._delays.delivery(num_before), 6)
            one = self._open[output.request_id]
            if output.new_token_ids:
                one.token_times_s.append(received_s)
                one.num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                self._end(one, output, received_s)

    def cancel(self) -> None:
        """Tally all requests in flight as cancelled."""
        if self._tally is not None:
            for one in self._in_flight:
                self._tally.add(self._record(one, "cancelled"))

    def records(self) -> list[RequestRecord]:
        """Return the sent requests' records, by arrival; those in flight are "cancelled"."""
        known = self._so_far()
        return [known[place] for place in sorted(known)]

    def records_as_sent(self) -> list[RequestRecord]:
        """Return the records in the order of sending; a later call only adds to them."""
        known = self._so_far()
        return [known[place] for place in self._places[: self._num_sent].tolist()]

    @property
    def _in_flight(self) -> Iterable[_Open]:
        return chain(self._open.values(), (one for _, _, one in self._retries))

    def _so_far(self) -> dict[int, RequestRecord]:
        """Return all records; key the place in the workload."""
        open_ = {one.place: self._record(one, "cancelled") for one in self._in_flight}
        return self._records | open_

    def _look_ahead(self) -> None:
        is_over = self._num_sent == len(self._workload)
        self._next_s = None if is_over else float(self._arrivals_s[self._num_sent])

    def _send(self, arrival_s: float) -> AddRequest:
        """Send the next request to arrive, new or again."""
        if self._next_s != arrival_s:
            _, _, one = heapq.heappop(self._retries)
            one.message = msgspec.structs.replace(
                one.message, request_id=self._another_id(one), arrival_time_s=arrival_s
            )
        else:
            place = int(self._places[self._num_sent])
            request = self._workload[place]
            prompt = self._prompts.draw(request)
            one = _Open(place, _message(str(place), request, prompt, arrival_s))
            self._num_sent += 1
            self._look_ahead()
            self.counts["cancelled"] += 1
        self._open[one.message.request_id] = one
        return one.message

    def _another_id(self, one: _Open) -> str:
        """Return a new id: engines that had the request before may not know of its end."""
        return f"{one.place}-{next(self._again)}"

    def _end(self, one: _Open, output: RequestOutput, now_s: float) -> None:
        assert output.finish_reason is not None
        del self._open[one.message.request_id]
        if output.finish_reason is FinishReason.REFUSED and one.num_sent <= self._max_retries:
            at_s = now_s + (output.retry_after_s or 0.0)
            heapq.heappush(self._retries, (at_s, one.place, one))
            one.num_sent += 1
            self.num_retries += 1
            return
        status = _STATUSES[output.finish_reason]
        self.counts["cancelled"] -= 1
        self.counts[status] += 1
        record = self._record(one, status, output)
        if self._tally is None:
            self._records[one.place] = record
        else:
            self._tally.add(record)

    def _record(
        self, one: _Open, status: Status, output: RequestOutput | None = None
    ) -> RequestRecord:
        """Args: output: the last one."""
        request = self._workload[one.place]
        return RequestRecord(
            request=request,
            sent_s=request.arrival_s,
            status=status,
            token_times_s=one.token_times_s,
            num_tokens=one.num_tokens,
            retry_after_s=None if output is None else output.retry_after_s,
            error=None if output is None else output.error,
            num_cached_tokens=None if output is None else output.num_cached_tokens,
        )


@lru_cache(maxsize=4096)
def _params(num_output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=num_output_tokens)


def _message(
    request_id: str, request: WorkloadRequest, prompt: TokenIds, arrival_s: float
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=_params(request.num_output_tokens),
        service=ServiceParams(
            slo_class=request.slo_class or INTERACTIVE,
            tenant=request.tenant or DEFAULT_TENANT,
            priority=request.priority,
        ),
        arrival_time_s=arrival_s,
    )
