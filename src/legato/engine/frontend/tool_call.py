"""What a reader of one tool call returns; each form of calls has a reader."""

import secrets
import string
from collections.abc import Iterator
from typing import Protocol

CallPiece = tuple[str | None, str]
"""The call's name, in the first piece; then pieces of its arguments."""

_ID_LETTERS = string.ascii_letters + string.digits


class CallReader(Protocol):
    """Reads one call. How the text is cut makes no difference.

    Attributes:
        rest: the text after the call; None until it ends.
        no_call: the text that began like a call but is none; set together with `rest`.
        call_id: the call's id, from its first piece on.
    """

    rest: str | None
    no_call: str | None
    call_id: str

    def feed(self, text: str) -> Iterator[CallPiece]:
        """Yield the call's new pieces. Must not be called after its end."""

    def close(self) -> None:
        """Finish after the last text; an incomplete call is none."""


def new_call_id(num_chars: int | None = None) -> str:
    """Args: num_chars: letters and digits that a chat template requires; None for any id."""
    if num_chars is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(num_chars))
