"""Counts a request's drafts, and how many of them were right."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from legato.core.step_record import DrafterName
from legato.observe.traces.request_story import RequestStory


class DraftCounts(NamedTuple):
    """Drafts in the steps of a running stream.

    Attributes:
        num_steps: steps with its next token, with or without drafts after it.
        num_drafts, num_accepted: drafts, and right drafts; key the drafter.
    """

    num_steps: int
    num_drafts: Counter[DrafterName]
    num_accepted: Counter[DrafterName]

    @property
    def tokens_a_step(self) -> float | None:
        """Tokens that a step sampled for it, on average; None without any step."""
        return 1.0 + self.num_accepted.total() / self.num_steps if self.num_steps else None


def drafted(story: RequestStory) -> DraftCounts:
    """Count a request's drafts, as far as the trace goes."""
    streaming = [chunk for _, chunk in story.own_chunks() if chunk.kind != "prefill"]
    found = DraftCounts(len(streaming), Counter(), Counter())
    for chunk in streaming:
        if chunk.drafter is not None:
            found.num_drafts[chunk.drafter] += chunk.num_drafts
            found.num_accepted[chunk.drafter] += chunk.num_accepted
    return found


def drafted_by_all(requests: Iterable[DraftCounts]) -> DraftCounts:
    """Add up the drafts of several requests."""
    found = DraftCounts(0, Counter(), Counter())
    for one in requests:
        found = DraftCounts(
            found.num_steps + one.num_steps,
            found.num_drafts + one.num_drafts,
            found.num_accepted + one.num_accepted,
        )
    return found
