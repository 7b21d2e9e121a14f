"""Divides a request's time among causes, so that the parts add up to the whole.

A request's life is cut into tiles, each with the shares of its causes. A step with several causes
is shared among them by tokens, except that drafts get the time they are expected to take.
docs/guides/trace.md defines each cause.
"""

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from legato.core.outputs import FinishReason
from legato.core.step_record import (
    BlocksFetched,
    ChunkRecord,
    DraftsEndedBy,
    StepRecord,
)
from legato.observe.traces.drafted import DraftCounts, drafted
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
"""Key cause, value its share; the shares sum to 1."""


class Tile(NamedTuple):
    """The time [start_s, end_s); `step` ran in it, unless None."""

    start_s: float
    end_s: float
    shares: Shares
    step: ObservedStep | None = None


class Span(NamedTuple):
    """The time from a request's arrival, or from one token, to the next token.

    Attributes:
        parts: key cause, value seconds; they sum to `end_s - start_s`.
        others, others_drafts: prompt tokens and drafts of other requests in its steps; key request
            id.
        drafts_ended_by: why its steps held no more drafts; key the reason, value steps.
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
    """A request's tiles, and the times when its tokens were sampled and written.

    Several tokens come at once if drafts were right: a delivery is the tokens of one step.

    Attributes:
        came_s: when the engine had each token.
        told_s: when each token was written to the client; if unknown, when the front end got it,
            or else the engine.
        firsts: index of each delivery's first token.
        is_pooled: whether it got a vector, which is then its one delivery, in place of tokens.
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
        ended = story.ended
        self.is_pooled = (
            ended is not None
            and ended.finish_reason is FinishReason.STOP
            and not ended.num_output_tokens
        )
        computed = [step for step, _ in story.own_chunks()] if self.is_pooled else []
        if computed:
            last = computed[-1]
            self.firsts, self.came_s = [0], [last.ended_s]
            self.told_s = [last.received_s or last.ended_s]

    @property
    def begins_s(self) -> float | None:
        """When the request came; None if unknown."""
        return self._tiles[0].start_s if self._tiles else None

    def first_token(self) -> Span | None:
        """Return the span from arrival to the first token; None if the trace lacks either."""
        if not self.told_s or self._story.arrived is None:
            return None
        return self._span(self._tiles[0].start_s, 0)

    def gaps(self) -> list[float]:
        """Return the seconds from each delivery to the next."""
        told_s = [self.told_s[first] for first in self.firsts]
        return [after - before for before, after in pairwise(told_s)]

    def gap(self, index: int) -> Span:
        """Return the span from delivery `index` to the next."""
        return self._span(self.told_s[self.firsts[index]], self.firsts[index + 1])

    def _span(self, start_s: float, token: int) -> Span:
        """Return the span from `start_s` to the writing of a token."""
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
    """The waits of one request.

    Attributes:
        name: by which `read_story` finds it; the engine's id if the trace has no answer.
        slo_class, num_prompt_tokens: None if it came before the trace began.
        num_output_tokens: in the trace.
        drafted: how many of them were drafted.
        first: until its first token or its vector; None if the trace lacks it or the arrival.
        longest: between two deliveries; None if there are fewer than two.
    """

    name: str
    choice: int
    slo_class: str | None
    num_prompt_tokens: int | None
    num_output_tokens: int
    drafted: DraftCounts
    first: Span | None
    longest: Span | None


def read_waits(path: Path) -> Iterator[Waits]:
    """Yield the waits of each request in a trace of lines of JSON; raises as `read_stories`."""
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
        num_output_tokens=0 if attribution.is_pooled else len(attribution.told_s),
        drafted=drafted(story),
        first=attribution.first_token(),
        longest=None if longest is None else attribution.gap(longest),
    )


def total_parts(spans: Iterable[Span | None]) -> Counter[Cause]:
    """Sum the parts of all spans; key cause, value seconds."""
    total: Counter[Cause] = Counter()
    for span in spans:
        if span is not None:
            total.update(span.parts)
    return total


def _sent_s(story: RequestStory) -> list[float]:
    """Return when its tokens were written to the client; empty if unknown."""
    answer = story.answer
    return answer.sent_s.get(story.choice, []) if answer is not None and answer.is_streamed else []


def _most_tokens(story: RequestStory, sent_s: list[float]) -> int:
    """Return how many tokens count: drafts may go beyond a request's end, and are then dropped."""
    most = sys.maxsize if story.ended is None else story.ended.num_output_tokens
    if sent_s and story.answer is not None and story.choice in story.answer.finish_reasons:
        most = min(most, len(sent_s))
    return most


def _tiles(story: RequestStory) -> list[Tile]:
    """Return tiles from the request's arrival to the end of its last step in the engine."""
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
            begins_s = max(begins_s, before_s)  # it may be planned while the previous step runs
            is_next = next_id is None or record.step_id == next_id
            cause: Cause = "between_steps" if is_next else "unrecorded"
            tiles += _gap(story.fetched, before_s, begins_s, cause)
        tiles.append(Tile(begins_s, record.ended_s, state.shares_in(step), step))
        next_id = record.step_id + 1
    return tiles


def _gap(
    fetched: BlocksFetched | None, start_s: float, end_s: float, cause: Cause
) -> Iterator[Tile]:
    """Yield the time between two steps, with the time spent waiting for blocks."""
    if fetched is None:
        begun_s = ended_s = start_s
    else:
        begun_s = min(max(fetched.begun_s, start_s), end_s)
        ended_s = min(max(fetched.ended_s, start_s), end_s)
    yield Tile(start_s, begun_s, {cause: 1.0})
    yield Tile(begun_s, ended_s, {"transfer": 1.0})
    yield Tile(ended_s, end_s, {cause: 1.0})


class _State:
    """A request's state, step by step."""

    def __init__(self, story: RequestStory) -> None:
        self._story = story
        self._is_running = story.arrived is None  # it came before the trace began
        self._was_preempted = False
        self._num_computed = 0  # most tokens so far: tokens below are computed again

    def shares_in(self, step: ObservedStep) -> Shares:
        request_id, record = self._story.request_id, step.record
        arrived = self._story.arrived
        if arrived is not None and record.planned_s < arrived.taken_s:
            return {"inbox": 1.0}  # the step was in flight when the request came
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
    """Return a step's tokens, as a request without a chunk in it counts them."""
    return Counter(
        {
            "others_prefill": step.num_prefill,
            "others_decode": step.num_decode,
            "others_drafts": step.num_drafts,
        }
    )


def _of_others(steps: Iterable[ObservedStep], request_id: str) -> tuple[Counter[str], Counter[str]]:
    """Return the prompt tokens and drafts of other requests in these steps; key request id."""
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
    """Return shares: drafts get their expected time if known, and tokens share the rest equally."""
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
