"""The requests of a trace side by side: how long each waited, and for what."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from legato.observe.traces.attribution import Attribution, Cause, Span
from legato.observe.traces.request_story import RequestStory, read_stories


class Waits(NamedTuple):
    """What one request waited for.

    Attributes:
        name: by which `read_story` finds it, the engine's where the trace has no answer.
        slo_class, num_prompt_tokens: None where it came before the trace began.
        num_output_tokens: that are in the trace.
        first: until its first token; None where there is none, or its arrival is not in the trace.
        longest: between two tokens; None where there are no two.
    """

    name: str
    choice: int
    slo_class: str | None
    num_prompt_tokens: int | None
    num_output_tokens: int
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
