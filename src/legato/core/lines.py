"""Lines of bytes that come in chunks."""


class LineBuffer:
    """Cuts chunks into lines at LF alone.

    httpx's `iter_lines` and `str.splitlines` also cut at U+2028 and its like, which JSON may
    contain.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that the chunk completes, without their ends."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines
