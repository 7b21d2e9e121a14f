"""Prompts that were submitted together, and how far they are."""

import asyncio
from collections.abc import Callable

from legato.engine.frontend.completion import CompletionDelta

Take = Callable[[int, CompletionDelta], object]
"""Is given the index of a prompt and what is new of a completion of it, the moment that comes.

All streams are served in one pass a step, so it must not take long. What it raises ends the
submission.
"""


class Submission:
    """Made by `EngineClient.submitted`.

    Args:
        num_completions: of all prompts.

    Attributes:
        request_ids: the engine's, of those that were sent.
        begun: set at the first delta, or at the end where none came.
        ended: set once all completions have ended, or an error has ended them.
    """

    def __init__(self, num_completions: int, take: Take) -> None:
        self.request_ids: list[str] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._num_running = num_completions
        self._take = take
        self._error: Exception | None = None

    def take(self, prompt_index: int, delta: CompletionDelta) -> None:
        """Hand a delta on."""
        self._take(prompt_index, delta)
        self.begun.set()
        if delta.finish_reason is not None:
            self._num_running -= 1
            if not self._num_running:
                self.ended.set()

    def fail(self, error: Exception) -> None:
        """Let no more deltas come; nothing happens where none would."""
        if not self.ended.is_set():
            self._error = error
            self.begun.set()
            self.ended.set()

    def check(self) -> None:
        """Raises the error that ended it, if one did."""
        if self._error is not None:
            raise self._error
