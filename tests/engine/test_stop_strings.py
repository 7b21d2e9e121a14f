import itertools

from hypothesis import given
from hypothesis import strategies as st

from legato.language.output_text import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOP = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stop: list[str], *, include: bool) -> tuple[str, str | None]:
    stream = StopStrings(stop, include_in_output=include)
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        if stream.matched is not None:
            return text, stream.matched
    return text + stream.flush(), None


def expected(text: str, stop: list[str], *, include: bool) -> tuple[str, str | None]:
    """By definition: read on until what was read ends in a stop string, the longest if several."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            matched = max(ending, key=len)
            return (text[:end] if include else text[: end - len(matched)]), matched
    return text, None


@given(TEXT, STOP, st.lists(st.integers(0, 30)), st.booleans())
def test_cutting_the_text_changes_nothing(
    text: str, stop: list[str], cuts: list[int], include: bool
) -> None:
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    assert run(pieces, stop, include=include) == expected(text, stop, include=include)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stream = StopStrings(["\n\nUser:"], include_in_output=False)
    assert stream.push("Hello") == "Hello"
    assert stream.push(" there\n") == " there"
    assert stream.push("\nUse") == ""
    assert stream.push("ful") == "\n\nUseful"
