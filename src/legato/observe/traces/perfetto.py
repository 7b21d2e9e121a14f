"""Writes records as Chrome trace events for the Perfetto UI: steps on top, a track a request.

The file is the format's JSON array, whose end may be missing, so that a killed writer leaves a
readable file. Times are microseconds.
"""

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from legato.core.step_record import (
    AnswerRecord,
    BlocksFetched,
    ChunkRecord,
    GrammarReady,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.observe.traces.trace_file import TraceHeader, TraceLine, open_binary

_STEPS, _REQUESTS = 1, 2  # process ids, which Perfetto shows as groups, in this order
_STEP_TRACK = 0
_encode = msgspec.json.Encoder().encode

Event = dict[str, Any]
"""Key a field of the trace event format."""

_Placed = tuple[int, float, ChunkRecord]
"""A chunk, after its step's id and the start of its slice in seconds."""


class PerfettoEvents:
    """Turns records into events, in order of arrival.

    Arrows lead from each chunk of a request to its next one, but not between the tokens of a stream
    that advances in every step.
    """

    def __init__(self) -> None:
        self._tracks: dict[str, int] = {}  # key request id
        self._waiting_since_s: dict[str, float] = {}  # key request id
        self._last_chunk: dict[str, _Placed] = {}  # key request id
        self._num_arrows = 0
        self._groups = {"": _STEPS}  # key replica id, value the process id of its steps
        self._now_s: dict[str, float] = {}  # of the latest step; key replica id

    def begin(self, header: TraceHeader) -> Iterator[Event]:
        """Yield the events that name the groups."""
        for pid, name in ((_STEPS, "engine"), (_REQUESTS, "requests")):
            yield _name("process_name", pid, 0, name=name)
            yield _name("process_sort_index", pid, 0, sort_index=pid)
        yield _name("thread_name", _STEPS, _STEP_TRACK, name="steps")
        self._now_s[""] = header.started_s
        yield _instant("trace begins", header.started_s, _STEPS, _STEP_TRACK, header.settings)

    def of(self, line: TraceLine) -> Iterator[Event]:
        match line:
            case StepRecord():
                yield from self._step(line)
            case RequestArrived():
                yield from self._arrived(line)
            case GrammarReady():
                yield from self._grammar(line)
            case BlocksFetched():
                yield from self._fetched(line)
            case RequestEnded():
                yield from self._ended(line)
            case AnswerRecord():
                yield from self._answer(line)
            case _:
                name = f"{line.num_records} records dropped"
                yield _instant(name, max(self._now_s.values()), _STEPS, _STEP_TRACK, {})

    def _step(self, step: StepRecord) -> Iterator[Event]:
        group = yield from self._group(step.replica_id)
        # Slices of a track must not overlap, but a step may be planned while another runs.
        before_s = self._now_s.get(step.replica_id, step.planned_s)
        times_s = max(step.planned_s, before_s), step.ended_s
        self._now_s[step.replica_id] = step.ended_s
        yield _slice(
            f"step {step.step_id}",
            times_s,
            group,
            _STEP_TRACK,
            {
                "decode_tokens": step.num_decode_tokens,
                "prefill_tokens": step.num_prefill_tokens,
                "dropped_tokens": step.num_dropped_tokens,
                "draft_tokens": step.num_draft_tokens,
                "accepted_tokens": step.num_accepted_tokens,
                "drafts_ended_by": step.drafts_ended_by,
                "budget_tokens": step.budget_tokens,
                "predicted_ms": _ms(step.predicted_s),
                "drafts_ms": _ms(step.drafts_s),
                "drafting_ms": _ms(step.drafting_s),
                "measured_ms": _ms(step.seconds),
                "limit_ms": _ms(step.limit_s),
                "planning_ms": _ms(step.started_s - step.planned_s),
                "first_waiting_held_by": step.held_by,
                "preempted": list(step.preempted),
                "failed": list(step.failed),
                "ran_out_of_memory": step.ran_out_of_memory,
            },
        )
        yield from _counters(step, times_s[0], group)
        for request_id in step.preempted:
            yield from self._preempted(step, request_id)
        for request_id, num_cached in step.admitted.items():
            yield from self._admitted(step, request_id, num_cached)
        for chunk in step.chunks:
            yield from self._chunk(step, chunk, times_s)

    def _chunk(
        self, step: StepRecord, chunk: ChunkRecord, times_s: tuple[float, float]
    ) -> Iterator[Event]:
        track = yield from self._track(chunk.request_id)
        args: dict[str, Any] = {
            "step": step.step_id,
            "start": chunk.start,
            "num_tokens": chunk.num_tokens,
            "ended_by": chunk.ended_by,
            "samples": chunk.num_samples,
        }
        if chunk.num_dropped:
            args["dropped"] = chunk.num_dropped
        if chunk.kind == "verify":
            args["drafted"] = chunk.num_drafts
            args["accepted"] = chunk.num_accepted
            args["drafter"] = chunk.drafter
        yield _slice(_chunk_name(chunk), times_s, _REQUESTS, track, args)
        here = step.step_id, times_s[0], chunk
        before = self._last_chunk.get(chunk.request_id)
        if before is not None:
            yield from self._arrow(before, here, track)
        self._last_chunk[chunk.request_id] = here

    def _arrow(self, before: _Placed, here: _Placed, track: int) -> Iterator[Event]:
        (step_before, start_s, chunk_before), (step_id, end_s, chunk) = before, here
        is_flowing = "prefill" not in (chunk.kind, chunk_before.kind)
        if is_flowing and step_before + 1 == step_id:
            return
        self._num_arrows += 1
        arrow = {"name": "next chunk", "cat": "chunk", "id": self._num_arrows, "pid": _REQUESTS}
        # Each end must be inside its chunk.
        yield {**arrow, "ph": "s", "tid": track, "ts": _us(start_s)}
        yield {**arrow, "ph": "f", "bp": "e", "tid": track, "ts": _us(end_s)}

    def _preempted(self, step: StepRecord, request_id: str) -> Iterator[Event]:
        track = yield from self._track(request_id)
        self._waiting_since_s[request_id] = step.planned_s
        yield _instant("preempted", step.planned_s, _REQUESTS, track, {"step": step.step_id})

    def _admitted(self, step: StepRecord, request_id: str, num_cached: int) -> Iterator[Event]:
        track = yield from self._track(request_id)
        since_s = self._waiting_since_s.pop(request_id, None)
        args = {"num_cached_tokens": num_cached}
        if since_s is not None:
            yield _slice("waiting", (since_s, step.planned_s), _REQUESTS, track, args)

    def _arrived(self, arrived: RequestArrived) -> Iterator[Event]:
        track = yield from self._track(arrived.request_id)
        self._waiting_since_s[arrived.request_id] = arrived.taken_s
        args = msgspec.structs.asdict(arrived)
        yield _slice("inbox", (arrived.arrived_s, arrived.taken_s), _REQUESTS, track, args)

    def _grammar(self, grammar: GrammarReady) -> Iterator[Event]:
        track = yield from self._track(grammar.request_id)
        since_s = self._waiting_since_s.get(grammar.request_id)
        if since_s is not None:
            self._waiting_since_s[grammar.request_id] = grammar.ready_s
            args = msgspec.structs.asdict(grammar)
            yield _slice("grammar", (since_s, grammar.ready_s), _REQUESTS, track, args)

    def _fetched(self, fetched: BlocksFetched) -> Iterator[Event]:
        track = yield from self._track(fetched.request_id)
        args = msgspec.structs.asdict(fetched)
        since_s = self._waiting_since_s.pop(fetched.request_id, None)
        if since_s is not None:
            yield _slice("waiting", (since_s, fetched.begun_s), _REQUESTS, track, {})
        if fetched.request_id in self._last_chunk:  # the first blocks are already in use
            yield _instant("blocks fetched", fetched.ended_s, _REQUESTS, track, args)
        else:
            times_s = fetched.begun_s, fetched.ended_s
            yield _slice("fetching blocks", times_s, _REQUESTS, track, args)

    def _ended(self, ended: RequestEnded) -> Iterator[Event]:
        track = yield from self._track(ended.request_id)
        since_s = self._waiting_since_s.pop(ended.request_id, None)
        if since_s is not None:
            yield _slice("waiting", (since_s, ended.ended_s), _REQUESTS, track, {})
        args = msgspec.structs.asdict(ended)
        yield _instant(f"ended: {ended.finish_reason}", ended.ended_s, _REQUESTS, track, args)
        self._last_chunk.pop(ended.request_id, None)

    def _answer(self, answer: AnswerRecord) -> Iterator[Event]:
        for choice, request_id in answer.request_ids.items():
            track = yield from self._track(request_id)
            args = {
                "http_id": answer.http_id,
                "answer_id": answer.answer_id,
                "choice": choice,
                "error": answer.error,
                "finish_reason": answer.finish_reasons.get(choice),
            }
            yield _instant("HTTP request came", answer.received_s, _REQUESTS, track, args)
            sent_s = answer.sent_s.get(choice)
            if sent_s and answer.is_streamed:
                yield _instant("first token written", sent_s[0], _REQUESTS, track, args)
                yield _instant("last token written", sent_s[-1], _REQUESTS, track, args)

    def _group(self, replica_id: str) -> Generator[Event, None, int]:
        """Return the process id of a replica's steps; yields its name if it is new."""
        group = self._groups.get(replica_id)
        if group is None:
            group = self._groups[replica_id] = _REQUESTS + len(self._groups)
            yield _name("process_name", group, 0, name=f"replica {replica_id}")
            yield _name("process_sort_index", group, 0, sort_index=_STEPS)
            yield _name("thread_name", group, _STEP_TRACK, name="steps")
        return group

    def _track(self, request_id: str) -> Generator[Event, None, int]:
        """Return the request's track; yields its name if it is new."""
        track = self._tracks.get(request_id)
        if track is None:
            track = self._tracks[request_id] = len(self._tracks) + 1
            yield _name("thread_name", _REQUESTS, track, name=request_id)
            yield _name("thread_sort_index", _REQUESTS, track, sort_index=track)
        return track


class PerfettoTrace:
    """Writes a trace, like `JsonlTrace`."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.num_bytes = 0
        self._file = open_binary(path, "wb")
        self._events = PerfettoEvents()
        self._separator = b"["
        self._put(self._events.begin(header))

    def write(self, lines: Iterable[TraceLine]) -> None:
        for line in lines:
            self._put(self._events.of(line))
        self._file.flush()

    def close(self) -> None:
        self._file.write(b"\n]\n")
        self._file.close()

    def _put(self, events: Iterable[Event]) -> None:
        for event in events:
            data = self._separator + b"\n" + _encode(event)
            self._separator = b","
            self._file.write(data)
            self.num_bytes += len(data)


def _chunk_name(chunk: ChunkRecord) -> str:
    if chunk.kind == "decode":
        return "decode"
    if chunk.kind == "verify":
        return f"verify {chunk.num_accepted} of {chunk.num_drafts}"
    return f"prefill {chunk.num_tokens}"


def _counters(step: StepRecord, time_s: float, group: int) -> Iterator[Event]:
    num_drafts, num_accepted = step.num_draft_tokens, step.num_accepted_tokens
    counts = {
        "tokens": {
            "prefill": step.num_prefill_tokens,
            "decode": step.num_decode_tokens - num_drafts,
            "drafts": num_drafts,
        },
        "drafts": {"accepted": num_accepted, "rejected": num_drafts - num_accepted},
        "requests": {"running": step.num_running, "waiting": step.num_waiting},
        "KV blocks": {"used": step.num_used_blocks, "cached": step.num_cached_blocks},
    }
    for name, values in counts.items():
        yield {"name": name, "ph": "C", "ts": _us(time_s), "pid": group, "args": values}


def _slice(
    name: str, times_s: tuple[float, float], pid: int, track: int, args: dict[str, Any]
) -> Event:
    start_us, end_us = map(_us, times_s)
    place = {"pid": pid, "tid": track, "ts": start_us, "dur": max(0.0, end_us - start_us)}
    return {"name": name, "ph": "X", **place, "args": args}


def _instant(name: str, time_s: float, pid: int, track: int, args: dict[str, Any]) -> Event:
    place = {"pid": pid, "tid": track, "ts": _us(time_s)}
    return {"name": name, "ph": "i", "s": "t", **place, "args": args}


def _name(kind: str, pid: int, track: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": track, "args": args}


def _us(time_s: float) -> float:
    return round(1e6 * time_s, 1)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
