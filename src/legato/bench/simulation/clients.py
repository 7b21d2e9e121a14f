"""What is around a simulated engine: its clients, and the time that passes outside of steps."""

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

import msgspec

from legato.bench.load.record import RequestRecord, Status
from legato.bench.simulation.prompts import SimulatedPrompts
from legato.bench.workload.requests import Workload, WorkloadRequest
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import INTERACTIVE, ServiceParams
from legato.core.tenant import DEFAULT_TENANT
from legato.core.token_ids import TokenIds

_STATUSES: dict[FinishReason, Status] = {
    FinishReason.LENGTH: "ok",
    FinishReason.REFUSED: "refused",
    FinishReason.ERROR: "error",
}


class Delays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What passes outside of steps: seconds, each a constant and what a token adds to it.

    Attributes:
        turnaround_s, turnaround_token_s: from the end of a step to the next; a token is one that
            the former brought.
        intake_s, intake_token_s: from when a request is due to when the scheduler may see it; a
            token is one of its prompt.
        delivery_s, delivery_token_s: from the end of a step to a client; a token is one of the same
            step that is delivered before.
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
        """After a step that brought so many."""
        return self.turnaround_s + num_tokens * self.turnaround_token_s

    def intake(self, request: WorkloadRequest) -> float:
        return self.intake_s + request.num_prompt_tokens * self.intake_token_s

    def delivery(self, num_before: int) -> float:
        """Of a token behind so many others of its step."""
        return self.delivery_s + num_before * self.delivery_token_s


NO_DELAYS = Delays()


class SimulatedClients:
    """Sends each request when it is due, and notes what comes.

    Args:
        delays: on the way to the scheduler and back.

    Attributes:
        counts: of the requests that were sent; those in flight are "cancelled".
    """

    def __init__(self, workload: Workload, delays: Delays = NO_DELAYS) -> None:
        self._workload = workload
        self._delays = delays
        arrivals_s = [request.arrival_s + delays.intake(request) for request in workload]
        # Key place in the workload; a short prompt may overtake a long one on its way.
        self._arrivals_s = dict(sorted(enumerate(arrivals_s), key=itemgetter(1)))
        self._places = list(self._arrivals_s)
        self._num_sent = 0
        self._prompts = SimulatedPrompts()
        self._token_times_s: list[list[float]] = [[] for _ in workload]
        self._records: dict[int, RequestRecord] = {}  # key place in the workload
        self.counts: Counter[Status] = Counter()

    @property
    def next_arrival_s(self) -> float | None:
        if self._num_sent == len(self._workload):
            return None
        return self._arrivals_s[self._places[self._num_sent]]

    def send(self, now_s: float) -> list[AddRequest]:
        """The requests that have arrived since."""
        sent: list[AddRequest] = []
        while (arrival_s := self.next_arrival_s) is not None and arrival_s <= now_s:
            place = self._places[self._num_sent]
            request = self._workload[place]
            sent.append(_message(str(place), request, self._prompts.draw(request), arrival_s))
            self._num_sent += 1
        self.counts["cancelled"] += len(sent)
        return sent

    def request(self, request_id: str) -> WorkloadRequest:
        """What was asked for by a message that was sent."""
        return self._workload[int(request_id)]

    def receive(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """Take what a step that ended at `now_s` brought."""
        for num_before, output in enumerate(outputs):
            index = int(output.request_id)
            received_s = round(now_s + self._delays.delivery(num_before), 6)
            self._token_times_s[index] += [received_s] * len(output.new_token_ids)
            if output.finish_reason is not None:
                self._end(index, output)

    def records(self) -> list[RequestRecord]:
        """Of the requests that were sent, by arrival; those in flight are "cancelled"."""
        return [self._so_far(place) for place in sorted(self._places[: self._num_sent])]

    def records_as_sent(self) -> list[RequestRecord]:
        """The same in the order in which they were sent, to which a later look only adds."""
        return [self._so_far(place) for place in self._places[: self._num_sent]]

    def _so_far(self, place: int) -> RequestRecord:
        return self._records.get(place) or self._record(place, "cancelled")

    def _end(self, index: int, output: RequestOutput) -> None:
        assert output.finish_reason is not None
        assert index not in self._records, "a request ends once"
        status = _STATUSES[output.finish_reason]
        self.counts["cancelled"] -= 1
        self.counts[status] += 1
        self._records[index] = self._record(index, status, output)

    def _record(
        self, index: int, status: Status, output: RequestOutput | None = None
    ) -> RequestRecord:
        """Args: output: the last one."""
        request, times_s = self._workload[index], self._token_times_s[index]
        return RequestRecord(
            request=request,
            sent_s=request.arrival_s,
            status=status,
            token_times_s=times_s,
            num_tokens=len(times_s),
            retry_after_s=None if output is None else output.retry_after_s,
            error=None if output is None else output.error,
            num_cached_tokens=None if output is None else output.num_cached_tokens,
        )


def _message(
    request_id: str, request: WorkloadRequest, prompt: TokenIds, arrival_s: float
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, seed=0, max_tokens=request.num_output_tokens),
        service=ServiceParams(
            slo_class=request.slo_class or INTERACTIVE,
            tenant=request.tenant or DEFAULT_TENANT,
            priority=request.priority,
        ),
        arrival_time_s=arrival_s,
    )
