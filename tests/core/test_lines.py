"""Lines of bytes that come in chunks."""

from hypothesis import given
from hypothesis import strategies as st

from legato.core.lines import LineBuffer


@given(chunks=st.lists(st.text("a\u2028\x85\r\n").map(str.encode)))
def test_chunks_are_cut_at_lf_alone(chunks: list[bytes]) -> None:
    buffer = LineBuffer()
    lines = [line for chunk in chunks for line in buffer.feed(chunk)]
    assert lines == b"".join(chunks).split(b"\n")[:-1]
