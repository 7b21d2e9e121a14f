"""Metrics of drafts: how many were verified, how many were right, and why there were no more."""

from collections import Counter
from typing import get_args

from legato.core.step_record import ChunkRecord, DrafterName, DraftsEndedBy, StepRecord
from legato.observe.metrics.registry import MetricRegistry

_NUM_POSITIONS = 16
"""Positions in a draft that are counted separately."""


class DraftMetrics:
    """Counts drafts. As in vLLM, a draft is all draft tokens of one stream in one step."""

    def __init__(self, registry: MetricRegistry) -> None:
        section = registry.section("Drafts")
        drafters = get_args(DrafterName)
        drafts = section.counter(
            "spec_decode_num_drafts",
            "Streams of a step with draft tokens behind their next token, each time. Drafters: "
            "`own` (a request's own tokens), `recent` (its tenant's recent outputs), `model`.",
            "drafter",
        )
        draft_tokens = section.counter(
            "spec_decode_num_draft_tokens", "Draft tokens that were verified.", "drafter"
        )
        accepted = section.counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that were right.", "drafter"
        )
        per_position = section.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            f"The same by their place in the draft, from 0; the first {_NUM_POSITIONS} places.",
            "position",
        )
        ended = section.counter(
            "drafts_ended",
            "Steps of streams, by why they held no more drafts: `proposals` (none were left), "
            "`worth`, `time_budget` (an SLO), `token_budget`, `memory`.",
            "ended_by",
            own=True,
        )
        self._stream_steps = section.counter(
            "stream_steps",
            "Streams of a step, each time: 1 + accepted tokens over these is how many tokens a "
            "step brings a stream.",
            own=True,
        ).of()
        # Created at once, so that all appear from 0 on.
        self._drafts = {name: drafts.of(name) for name in drafters}
        self._draft_tokens = {name: draft_tokens.of(name) for name in drafters}
        self._accepted = {name: accepted.of(name) for name in drafters}
        self._per_position = [per_position.of(str(place)) for place in range(_NUM_POSITIONS)]
        self._ended = {reason: ended.of(reason) for reason in get_args(DraftsEndedBy)}

    def observe(self, step: StepRecord) -> None:
        """Count the drafts of a step that has run."""
        if step.drafts_ended_by is not None:
            self._ended[step.drafts_ended_by].inc()
        streams = [chunk for chunk in step.chunks if chunk.kind != "prefill"]
        self._stream_steps.inc(len(streams))
        drafted = [chunk for chunk in streams if chunk.num_drafts]
        for name in {chunk.drafter for chunk in drafted if chunk.drafter is not None}:
            self._count(name, [chunk for chunk in drafted if chunk.drafter == name])
        lengths = Counter(chunk.num_accepted for chunk in drafted)
        num_right = len(drafted)
        for place, counter in enumerate(self._per_position):
            num_right -= lengths[place]
            if not num_right:
                break
            counter.inc(num_right)

    def _count(self, name: DrafterName, drafted: list[ChunkRecord]) -> None:
        self._drafts[name].inc(len(drafted))
        self._draft_tokens[name].inc(sum(chunk.num_drafts for chunk in drafted))
        self._accepted[name].inc(sum(chunk.num_accepted for chunk in drafted))
