"""Where requests' time went: a partition of it, so that the parts add up to the whole.

The request's life is cut into tiles, each with the shares that causes have in it. What a step holds
of several causes is shared among them by tokens, but drafts have what they are expected to take.
docs/guides/trace.md defines each cause.
"""

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from legato.core.step_record import (
    BlocksFetched,
    ChunkRecord,
    DraftsEndedBy,
    StepRecord,
)
from legato.observe.traces.drafted import Drafted, drafted
from legato.observe.traces.request_story import ObservedStep, RequestStory, read_stories

Cause = Literal[
    "http_in",
    "inbox",
    "grammar",
    "queue",
    "memory",
    "transfer",
    "preemption",
    "own_prefill",
    "others_prefill",
    "own_decode",
    "others_decode",
    "own_drafts",
    "others_drafts",
    "yielded",
    "between_steps",
    "unrecorded",
    "http_out",
]

_DRAFTS: Collection[Cause] = ("own_drafts", "others_drafts")

Shares = Mapping[Cause, float]
"""Key cause, value its share; they sum to 1."""


class Tile(NamedTuple):
    """The time [start_s, end_s); `step` is what ran, if a step did."""

    start_s: float
    end_s: float
    shares: Shares
    step: ObservedStep | None = None


class Span(NamedTuple):
    """The time until a token, since its request came or since the token before.

    Attributes:
        parts: key cause, value seconds; they sum to `end_s - start_s`.
        others, others_drafts: prompt tokens, and drafts, that its steps computed for others; key
            request id.
        drafts_ended_by: of its steps, by why they held no more drafts.
    """

    start_s: float
    end_s: float
    parts: dict[Cause, float]
    others: Counter[str]
    others_drafts: Counter[str]
    drafts_ended_by: Counter[DraftsEndedBy]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Attribution:
    """A request's tiles, and when its tokens came and were written.

    Several tokens come at once where drafts were right: a delivery is what one step brought.

    Attributes:
        came_s: when the engine had each of its tokens.
        told_s: when each was written to the client; where that is not known, when the front end had
            it, or else the engine.
        firsts: the place of each delivery's first token among them.
    """

    def __init__(self, story: RequestStory) -> None:
        self._story = story
        self._tiles = _tiles(story)
        self._starts_s = [tile.start_s for tile in self._tiles]
        self.came_s: list[float] = []
        self.told_s: list[float] = []
        self.firsts: list[int] = []
        sent_s = _sent_s(story)
        most = _most_tokens(story, sent_s)
        for step, chunk in story.own_chunks():
            count = min(chunk.num_accepted + 1, most - len(self.came_s)) if chunk.num_samples else 0
            if count > 0:
                self.firsts.append(len(self.came_s))
                self.came_s += [step.ended_s] * count
                self.told_s += [step.received_s or step.ended_s] * count
        self.told_s[: len(sent_s)] = sent_s[: len(self.told_s)]

    @property
    def begins_s(self) -> float | None:
        """When the request came, as far as is known."""
        return self._tiles[0].start_s if self._tiles else None

    def first_token(self) -> Span | None:
        """From the request's arrival to its first token; None where there is none, or its arrival
        is not in the trace."""
        if not self.told_s or self._story.arrived is None:
            return None
        return self._span(self._tiles[0].start_s, 0)

    def gaps(self) -> list[float]:
        """Seconds from each delivery to the next."""
        told_s = [self.told_s[first] for first in self.firsts]
        return [after - before for before, after in pairwise(told_s)]

    def gap(self, index: int) -> Span:
        """From delivery `index` to the next."""
        return self._span(self.told_s[self.firsts[index]], self.firsts[index + 1])

    def _span(self, start_s: float, token: int) -> Span:
        """From `start_s` until a token was told."""
        came_s, told_s = self.came_s[token], self.told_s[token]
        parts: defaultdict[Cause, float] = defaultdict(float)
        steps: list[ObservedStep] = []
        now_s = start_s
        first = max(0, bisect_right(self._starts_s, start_s) - 1)
        for tile in self._tiles[first:]:
            end_s = min(tile.end_s, came_s)
            if tile.start_s >= came_s:
                break
            if end_s <= now_s:
                continue
            for cause, share in tile.shares.items():
                parts[cause] += share * (end_s - now_s)
            if tile.step is not None:
                steps.append(tile.step)
            now_s = end_s
        parts["http_out"] += told_s - now_s
        return Span(
            start_s,
            told_s,
            {cause: seconds for cause, seconds in parts.items() if seconds},
            *_of_others(steps, self._story.request_id),
            Counter(filter(None, (step.record.drafts_ended_by for step in steps))),
        )


class Waits(NamedTuple):
    """What one request waited for.

    Attributes:
        name: by which `read_story` finds it, the engine's where the trace has no answer.
        slo_class, num_prompt_tokens: None where it came before the trace began.
        num_output_tokens: that are in the trace.
        drafted: how it came by them.
        first: until its first token; None where there is none, or its arrival is not in the trace.
        longest: between two deliveries; None where there are no two.
    """

    name: str
    choice: int
    slo_class: str | None
    num_prompt_tokens: int | None
    num_output_tokens: int
    drafted: Drafted
    first: Span | None
    longest: Span | None


def read_waits(path: Path) -> Iterator[Waits]:
    """Those of each request in a trace of lines of JSON; raises as `read_stories`."""
    return map(waits_of, read_stories(path))


def waits_of(story: RequestStory) -> Waits:
    attribution = Attribution(story)
    gaps = attribution.gaps()
    longest = max(range(len(gaps)), key=gaps.__getitem__, default=None)
    arrived = story.arrived
    return Waits(
        name=story.request_id if story.answer is None else story.answer.http_id,
        choice=story.choice,
        slo_class=None if arrived is None else arrived.slo_class,
        num_prompt_tokens=None if arrived is None else arrived.num_prompt_tokens,
        num_output_tokens=len(attribution.told_s),
        drafted=drafted(story),
        first=attribution.first_token(),
        longest=None if longest is None else attribution.gap(longest),
    )


def total_parts(spans: Iterable[Span | None]) -> Counter[Cause]:
    """Seconds of all of them; key cause."""
    total: Counter[Cause] = Counter()
    for span in spans:
        if span is not None:
            total.update(span.parts)
    return total


def _sent_s(story: RequestStory) -> list[float]:
    """When its tokens were written to the client; empty where that is not known."""
    answer = story.answer
    return answer.sent_s.get(story.choice, []) if answer is not None and answer.is_streamed else []


def _most_tokens(story: RequestStory, sent_s: list[float]) -> int:
    """Tokens that count: none that a step brought behind the end, which drafts may go beyond."""
    most = sys.maxsize if story.ended is None else story.ended.num_output_tokens
    if sent_s and story.answer is not None and story.choice in story.answer.finish_reasons:
        most = min(most, len(sent_s))
    return most


def _tiles(story: RequestStory) -> list[Tile]:
    """From the request's arrival to the end of the last step that the engine held it in."""
    tiles: list[Tile] = []
    answer, arrived = story.answer, story.arrived
    if arrived is not None:
        if answer is not None:
            tiles.append(Tile(answer.received_s, arrived.arrived_s, {"http_in": 1.0}))
        tiles.append(Tile(arrived.arrived_s, arrived.taken_s, {"inbox": 1.0}))
        if story.grammar is not None:
            tiles.append(Tile(arrived.taken_s, story.grammar.ready_s, {"grammar": 1.0}))
    steps = story.steps
    if story.grammar is not None:
        steps = [step for step in steps if step.record.planned_s >= story.grammar.ready_s]
    state = _State(story)
    next_id: int | None = None
    for step in steps:
        record = step.record
        begins_s = record.planned_s
        if tiles:
            before_s = tiles[-1].end_s
            begins_s = max(begins_s, before_s)  # it may be planned while the one before it runs
            is_next = next_id is None or record.step_id == next_id
            cause: Cause = "between_steps" if is_next else "unrecorded"
            tiles += _gap(story.fetched, before_s, begins_s, cause)
        tiles.append(Tile(begins_s, record.ended_s, state.shares_in(step), step))
        next_id = record.step_id + 1
    return tiles


def _gap(
    fetched: BlocksFetched | None, start_s: float, end_s: float, cause: Cause
) -> Iterator[Tile]:
    """The time between two steps, of which a part may be spent on waiting for blocks."""
    if fetched is None:
        begun_s = ended_s = start_s
    else:
        begun_s = min(max(fetched.begun_s, start_s), end_s)
        ended_s = min(max(fetched.ended_s, start_s), end_s)
    yield Tile(start_s, begun_s, {cause: 1.0})
    yield Tile(begun_s, ended_s, {"transfer": 1.0})
    yield Tile(ended_s, end_s, {cause: 1.0})


class _State:
    """What a request is doing, step by step."""

    def __init__(self, story: RequestStory) -> None:
        self._story = story
        self._is_running = story.arrived is None  # the trace began under it
        self._was_preempted = False
        self._num_computed = 0  # tokens, at most so far: those below were computed before

    def shares_in(self, step: ObservedStep) -> Shares:
        request_id, record = self._story.request_id, step.record
        arrived = self._story.arrived
        if arrived is not None and record.planned_s < arrived.taken_s:
            return {"inbox": 1.0}  # it was in flight when the request came
        if request_id in record.admitted:
            self._is_running = True
        if request_id in record.preempted:
            self._is_running, self._was_preempted = False, True
        if request_id in record.failed:
            return {"memory": 1.0} if record.ran_out_of_memory else {"own_prefill": 1.0}
        chunk = step.chunks.get(request_id)
        if chunk is not None:
            return self._computing(step, chunk)
        if self._is_fetching(record):
            return {"transfer": 1.0}
        return self._passed_over(step) if self._is_running else self._waiting(step)

    def _is_fetching(self, step: StepRecord) -> bool:
        fetched = self._story.fetched
        if fetched is None:
            return False
        return fetched.begun_s < step.ended_s and step.planned_s < fetched.ended_s

    def _computing(self, step: ObservedStep, chunk: ChunkRecord) -> Shares:
        tokens = _tokens(step)
        is_prefill = chunk.kind == "prefill"
        num_certain = chunk.num_tokens - chunk.num_drafts
        tokens["others_prefill" if is_prefill else "others_decode"] -= num_certain
        tokens["others_drafts"] -= chunk.num_drafts
        tokens["own_drafts"] += chunk.num_drafts
        num_again = max(0, min(self._num_computed - chunk.start, num_certain))
        come = chunk.start + num_certain + chunk.num_accepted
        self._num_computed = max(self._num_computed, come)
        tokens["preemption"] += num_again
        own: Cause = "own_prefill" if is_prefill else "own_decode"
        tokens[own] += num_certain - num_again
        return _shares(tokens, step.record)

    def _waiting(self, step: ObservedStep) -> Shares:
        if self._was_preempted:
            return {"preemption": 1.0}
        if step.record.held_by == "memory":
            return {"memory": 1.0}
        if step.record.held_by in ("max_num_seqs", "pace", "tenants"):
            return {"queue": 1.0}
        tokens = _tokens(step)
        tokens["queue"] = tokens.pop("others_decode")
        return _shares(tokens, step.record)

    def _passed_over(self, step: ObservedStep) -> Shares:
        is_stream = self._num_computed and self._is_decoding
        return {"yielded": 1.0} if is_stream else _shares(_tokens(step), step.record)

    @property
    def _is_decoding(self) -> bool:
        arrived = self._story.arrived
        return arrived is None or self._num_computed >= arrived.num_prompt_tokens


def _tokens(step: ObservedStep) -> "Counter[Cause]":
    """Of a step, as they are to a request without a chunk in it."""
    return Counter(
        {
            "others_prefill": step.num_prefill,
            "others_decode": step.num_decode,
            "others_drafts": step.num_drafts,
        }
    )


def _of_others(steps: Iterable[ObservedStep], request_id: str) -> tuple[Counter[str], Counter[str]]:
    """Prompt tokens and drafts of others in these steps; key request id."""
    prompts: Counter[str] = Counter()
    drafts: Counter[str] = Counter()
    for step in steps:
        for chunk in step.record.chunks:
            if chunk.request_id == request_id:
                continue
            if chunk.kind == "prefill":
                prompts[chunk.request_id] += chunk.num_tokens
            elif chunk.num_drafts:
                drafts[chunk.request_id] += chunk.num_drafts
    return prompts, drafts


def _shares(tokens: "Counter[Cause]", step: StepRecord) -> Shares:
    """Drafts have what they are expected to take, where that is known; the rest goes by tokens."""
    num_tokens, num_drafts = tokens.total(), sum(tokens[cause] for cause in _DRAFTS)
    of_drafts = step.drafts_share
    if of_drafts is None or not num_drafts:
        return {cause: count / num_tokens for cause, count in tokens.items() if count}
    each_draft, each_other = of_drafts / num_drafts, (1.0 - of_drafts) / (num_tokens - num_drafts)
    return {
        cause: count * (each_draft if cause in _DRAFTS else each_other)
        for cause, count in tokens.items()
        if count
    }
