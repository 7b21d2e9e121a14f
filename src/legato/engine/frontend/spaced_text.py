"""Text in pieces, without the space at its ends."""


class SpacedText:
    """Passes text on up to its last letter; trailing space waits for more text.

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
        """Drop the waiting space, and the space before the next letter."""
        self._is_trimmed = True
        self._waiting.clear()

    def release(self) -> None:
        """Pass the waiting space on."""
        self._ready += self._waiting
        self._waiting.clear()

    def taken(self) -> str:
        """Return the text that is ready, once."""
        text = "".join(self._ready)
        self._ready.clear()
        return text
