"""Prompts that were submitted together, and their progress."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from legato.core.kv_transfer import KVTransfer
from legato.core.pooling import PromptPooling
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.language.completion import CompletionDelta

Take = Callable[[int, CompletionDelta], object]
"""Called with the index of a prompt and each delta of its completions, as it comes.

All streams are served in one pass a step, so it must be quick. An exception from it ends the
submission.
"""


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to submit together, and how to complete them.

    Attributes:
        token_ids: of each prompt.
        request_id: the client's; need not be unique.
        kv_transfer: how the blocks of the only prompt move between this engine and another, as
            read by `Tickets`.
        pooling: how each prompt becomes a vector; None if it is completed.
        arrived_s: when the request arrived, on the clock of `time.monotonic`; None for now.
            Deadlines and metrics count from then.
    """

    token_ids: Sequence[Sequence[int]]
    params: SamplingParams
    request_id: str
    service: ServiceParams = ServiceParams()
    kv_transfer: KVTransfer | None = None
    pooling: PromptPooling | None = None
    arrived_s: float | None = None


class Submission:
    """The progress of prompts submitted together. Made by `Engine.submitted`.

    Args:
        num_completions: number of completions, summed over the prompts.

    Attributes:
        request_ids: the engine's ids of the requests that were sent.
        begun: set at the first delta, or at the end if there was none.
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
        """Deliver a delta."""
        self._take(prompt_index, delta)
        self.begun.set()
        if delta.finish_reason is not None:
            self._num_running -= 1
            if not self._num_running:
                self.ended.set()

    def fail(self, error: Exception) -> None:
        """End the submission with an error. After its end, this has no effect."""
        if not self.ended.is_set():
            self._error = error
            self.begun.set()
            self.ended.set()

    def check(self) -> None:
        """Raises the error that ended the submission, if one did."""
        if self._error is not None:
            raise self._error
