"""What drafts a request's steps held, and what these brought."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from legato.core.step_record import DrafterName
from legato.observe.traces.request_story import RequestStory


class Drafted(NamedTuple):
    """What a running stream's steps did with drafts.

    Attributes:
        num_steps: that held its next token, with or without drafts of those behind it.
        num_drafts, num_accepted: of these drafts, and those that were right; key who drafted.
    """

    num_steps: int
    num_drafts: Counter[DrafterName]
    num_accepted: Counter[DrafterName]

    @property
    def tokens_a_step(self) -> float | None:
        """Tokens that each of its steps brought, on average; None where there were none."""
        return 1.0 + self.num_accepted.total() / self.num_steps if self.num_steps else None


def drafted(story: RequestStory) -> Drafted:
    """As far as the trace goes."""
    streaming = [chunk for _, chunk in story.own_chunks() if chunk.kind != "prefill"]
    found = Drafted(len(streaming), Counter(), Counter())
    for chunk in streaming:
        if chunk.drafter is not None:
            found.num_drafts[chunk.drafter] += chunk.num_drafts
            found.num_accepted[chunk.drafter] += chunk.num_accepted
    return found


def drafted_by_all(requests: Iterable[Drafted]) -> Drafted:
    """Of several together."""
    found = Drafted(0, Counter(), Counter())
    for one in requests:
        found = Drafted(
            found.num_steps + one.num_steps,
            found.num_drafts + one.num_drafts,
            found.num_accepted + one.num_accepted,
        )
    return found
