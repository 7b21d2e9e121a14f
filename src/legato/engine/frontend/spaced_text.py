"""Text without the space at its ends, in pieces."""


class SpacedText:
    """Gives text out up to its last letter; the space behind that waits to see whether more comes.

    Args:
        is_trimmed: whether the space before its first letter is left out.
    """

    def __init__(self, *, is_trimmed: bool) -> None:
        self._is_trimmed = is_trimmed
        self._waiting: list[str] = []
        self._ready: list[str] = []

    def push(self, text: str) -> None:
        if self._is_trimmed:
            text = text.lstrip()
        letters = text.rstrip()
        if letters:
            self._is_trimmed = False
            self.release()
            self._ready.append(letters)
        if len(letters) < len(text):
            self._waiting.append(text[len(letters) :])

    def trim(self) -> None:
        """Leave out the space that waits, and that before the next letter."""
        self._is_trimmed = True
        self._waiting.clear()

    def release(self) -> None:
        """Let the space go that waits."""
        self._ready += self._waiting
        self._waiting.clear()

    def taken(self) -> str:
        """What can be passed on and was not yet."""
        text = "".join(self._ready)
        self._ready.clear()
        return text
