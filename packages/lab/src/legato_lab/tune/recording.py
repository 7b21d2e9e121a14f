"""Measures a machine from an engine's trace: its steps, and the time outside of them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from legato.core.step_record import RequestArrived, StepRecord
from legato.observe.traces.trace_file import TraceLine
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.record import RequestRecord

_IDLE_S = 0.05
"""A longer pause between two steps means that the engine had no work."""


class Recording(msgspec.Struct, frozen=True):
    """Attributes: steps, arrivals: by time."""

    steps: list[StepRecord]
    arrivals: list[RequestArrived]

    @classmethod
    def of(cls, lines: Iterable[TraceLine], since_s: float = 0.0) -> "Recording":
        """Take the records from `since_s` on, on the clock of the trace."""
        steps, arrivals = [], []
        for line in lines:
            if isinstance(line, StepRecord) and line.planned_s >= since_s:
                steps.append(line)
            elif isinstance(line, RequestArrived) and line.arrived_s >= since_s:
                arrivals.append(line)
        return cls(steps, sorted(arrivals, key=lambda arrival: arrival.arrived_s))

    def measured_steps(self) -> list[MeasuredStep]:
        """Return shapes and seconds of all steps whose rows were all computed at once."""
        return [
            (StepShape.of_chunks(step.chunks), step.seconds)
            for step in self.steps
            if step.went_as_planned
        ]

    def delays(self, records: Sequence[RequestRecord], start_s: float) -> Delays:
        """Fit the time outside of steps.

        Args:
            records: of the clients that sent all of the requests.
            start_s: of their run, on the clock of the recording.
        """
        intake, delivery = _journeys(self, records, start_s)
        turnaround_s, turnaround_token_s = _line(_turnarounds(self.steps))
        intake_s, intake_token_s = _line(intake)
        delivery_s, delivery_token_s = _line(delivery)
        return Delays(
            turnaround_s=turnaround_s,
            turnaround_token_s=turnaround_token_s,
            intake_s=intake_s,
            intake_token_s=intake_token_s,
            delivery_s=delivery_s,
            delivery_token_s=delivery_token_s,
        )


_Points = list[tuple[float, float]]
"""An amount that a time may depend on, and the time in seconds."""


def _turnarounds(steps: Sequence[StepRecord]) -> _Points:
    """Return each step's sampled rows, and the seconds until the next step."""
    points = []
    for step, following in pairwise(steps):
        seconds = following.ended_s - following.seconds - step.ended_s
        if seconds < _IDLE_S:
            points.append((float(_num_sampled(step)), seconds))
    return points


def _num_sampled(step: StepRecord) -> int:
    return sum(chunk.num_samples > 0 for chunk in step.chunks)


def _journeys(
    recording: Recording, records: Sequence[RequestRecord], start_s: float
) -> tuple[_Points, _Points]:
    """Return intake times by prompt tokens, and delivery times by tokens delivered before."""
    made = _made_tokens(recording.steps)
    arrivals: dict[int, deque[RequestArrived]] = defaultdict(deque)  # key: prompt length
    for arrival in recording.arrivals:
        arrivals[arrival.num_prompt_tokens].append(arrival)
    intake: _Points = []
    delivery: _Points = []
    for record in records:
        # Clients and engine use different ids, but requests of one length come in the same order.
        same_length = arrivals[record.request.num_prompt_tokens]
        if not same_length:
            continue
        arrival = same_length.popleft()
        due_s = start_s + record.request.arrival_s
        intake.append((float(record.request.num_prompt_tokens), arrival.arrived_s - due_s))
        for (ended_s, num_before), received_s in zip(
            made[arrival.request_id], record.token_times_s, strict=False
        ):
            delivery.append((float(num_before), start_s + received_s - ended_s))
    return intake, delivery


def _made_tokens(steps: Iterable[StepRecord]) -> dict[str, list[tuple[float, int]]]:
    """Return when each token was sampled, and how many of its step precede it; key request id."""
    made: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for step in steps:
        num_before = 0
        for chunk in step.chunks:
            if chunk.num_samples:
                tokens = [(step.ended_s, num_before)] * (1 + chunk.num_accepted)
                made[chunk.request_id] += tokens
                num_before += 1
    return made


def _line(points: _Points) -> tuple[float, float]:
    """Return constant and slope of the least-squares line, neither below 0."""
    if not points:
        return 0.0, 0.0
    amounts, seconds = np.array(points).T
    slope, constant = np.polyfit(amounts, seconds, 1) if np.ptp(amounts) else (0.0, 0.0)
    if slope <= 0.0 or constant < 0.0:
        return max(0.0, float(seconds.mean())), 0.0
    return float(constant), float(slope)
