"""Has bodies read in processes of their own: a zygote, and readers that it forks."""

import asyncio
import contextlib
import logging
import signal
from functools import partial

from legato.core.errors import InvalidRequestError
from legato.core.token_ids import TokenIds
from legato.engine.errors import RequestFailedError
from legato.engine.process.child_process import status_words
from legato.model.defaults import ModelDefaults
from legato.model.text_source import TextSource
from legato.model.vocabulary import Vocabulary
from legato.server.http.errors import ApiError, out_of_memory, readers_dead
from legato.server.limits import LARGE_BODY_BYTES
from legato.server.requests.outcome import Generation, Piece, Refused
from legato.server.requests.serving import Kind, Serving
from legato.server.text.lane import PATIENCE_S, Lane
from legato.server.text.messages import LoadText, Serve
from legato.server.text.reader_process import Outcome, ReaderLostError, ReaderProcess
from legato.server.text.zygote_process import ZygoteProcess

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 2
_RESTART_TIMEOUT_S = 30.0
_RESTART_PAUSE_S = 1.0


class TextProcesses:
    """Reads bodies; whatever they are, the event loop does no more than pass bytes on.

    A reader that takes too long or too much memory costs its own request alone. One that dies
    otherwise is replaced, and its body read again, once. So is the zygote, while its readers go on.

    Args:
        timeout_s: of processor time for one body.
    """

    def __init__(self, source: TextSource, timeout_s: float) -> None:
        self._asked = LoadText(source, timeout_s)
        self._timeout_s = timeout_s
        self._zygote = ZygoteProcess(self._asked)
        self._is_ready = asyncio.Event()
        self._small = Lane(partial(self._fork, is_low=False))
        self._large = Lane(partial(self._fork, is_low=True))
        self._running: asyncio.Task[None] | None = None

    async def loaded(self) -> tuple[Vocabulary, ModelDefaults]:
        """What was loaded, as far as others need it.

        Raises:
            ConfigError: the checkpoint's tokenizer cannot be used.
            EngineDeadError: the process died while loading it.
        """
        loaded = await self._zygote.loaded()
        if loaded.template_problem is not None:
            logger.warning("no chat: %s", loaded.template_problem)
        return loaded.vocabulary, loaded.defaults

    async def serve(self, serving: Serving) -> None:
        """From here on, bodies can be read."""
        self._zygote.send(Serve(serving))
        self._is_ready.set()
        self._running = asyncio.create_task(self._keep_running(serving))
        await self._small.warm_up()

    async def generation(self, kind: Kind, body: bytearray) -> tuple[Generation, list[TokenIds]]:
        """What a body asks to be generated, and the prompts.

        Raises:
            ApiError: it cannot be served, as its reader says.
            InvalidRequestError: it took too much time or memory.
            OverloadedError: too many bodies are waiting.
            RequestFailedError: readers die of something else over it.
        """
        outcome = await self.outcome(kind, body)
        assert isinstance(outcome.end, Generation)
        return outcome.end, outcome.prompts

    async def answer(self, kind: Kind, body: bytearray) -> list[bytes]:
        """The pieces of the whole answer to a body, in JSON.

        Raises:
            Exception: as `generation`.
        """
        outcome = await self.outcome(kind, body)
        return [part.data for part in outcome.parts if isinstance(part, Piece)]

    async def outcome(self, kind: Kind, body: bytearray, stored: bytes | None = None) -> Outcome:
        """What comes of a body; its end is not `Refused`.

        Args:
            stored: what the body was found to need, where its end was `NeedsStored`.

        Raises:
            Exception: as `generation`.
        """
        for _ in range(_NUM_ATTEMPTS):
            try:
                outcome = await self._read(kind, body, stored)
            except ReaderLostError as lost:
                logger.warning("a process died while it read a request: %s", lost)
                continue
            if isinstance(outcome.end, Refused):
                raise ApiError(outcome.end.status, outcome.end.detail)
            return outcome
        raise RequestFailedError("the processes that read this request died")

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        await self._zygote.close()

    async def _read(self, kind: Kind, body: bytearray, stored: bytes | None) -> Outcome:
        num_bytes = len(body) + len(stored or b"")
        lane = self._large if num_bytes > LARGE_BODY_BYTES else self._small
        async with lane.reader(num_bytes) as reader:
            zygote = self._zygote
            slow = asyncio.get_running_loop().call_later(PATIENCE_S, zygote.lower, reader)
            try:
                return await reader.read(kind, body, stored)
            except ReaderLostError:
                raise self._cause(await zygote.status(reader)) from None
            except asyncio.CancelledError:
                zygote.kill(reader)  # nobody waits for what it is doing
                raise
            finally:
                slow.cancel()

    def _cause(self, status: int | None) -> Exception:
        """Why a reader was lost, as `ReaderEnded` has it."""
        if status is None:
            return ReaderLostError("nobody knows of what")
        if status == -signal.SIGPROF:
            return InvalidRequestError(
                f"reading this request takes more than {self._timeout_s:g} s of processor time "
                "(--timeout-prompt)"
            )
        if status == -signal.SIGABRT:  # what tokenizers does without memory
            return out_of_memory()
        if (
            status == -signal.SIGSEGV
        ):  # what recurses without end, in the code of a grammar's compiler
            return InvalidRequestError("this request is nested too deeply")
        return ReaderLostError(status_words(status))

    async def _fork(self, *, is_low: bool) -> ReaderProcess:
        try:
            async with asyncio.timeout(_RESTART_TIMEOUT_S):
                await self._is_ready.wait()
        except TimeoutError:
            raise readers_dead() from None
        return await self._zygote.fork(is_low=is_low)

    async def _keep_running(self, serving: Serving) -> None:
        while True:
            await asyncio.wait([self._zygote.lost])
            self._is_ready.clear()
            logger.error("the process that forks readers died; another is started")
            await self._zygote.close()
            self._zygote = ZygoteProcess(self._asked)
            try:
                await self._zygote.loaded()
            except Exception as error:
                logger.error("it cannot be started: %s", error)
                await asyncio.sleep(_RESTART_PAUSE_S)
                continue
            self._zygote.send(Serve(serving))
            self._is_ready.set()
