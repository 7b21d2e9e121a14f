"""The HTTP server's side of the engine: starts its process and talks to it."""

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.engine.completion import CompletionDelta
from legato.engine.completion_stream import CompletionStream
from legato.engine.errors import EngineDeadError, OverloadedError, RequestFailedError
from legato.engine.ipc import FrameDecoder, pack_frame
from legato.engine.messages import EngineFailed, EngineInfo, EngineReady, EngineStats, FromEngine
from legato.engine.output_queue import OutputQueue
from legato.engine.prompts import build_requests
from legato.model.source import resolve_source
from legato.model.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_STOP_TIMEOUT_S = 5.0
_SHORT_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long an OpenMP thread spins for its next piece of work before it sleeps.

At the default, thirty times as long, the threads of a step hold cores that others need, and that
includes the thread they wait for: beside one busy process a step takes forty times as long
(docs/experiments.md). Not spinning at all doubles the length of a step.
"""


class EngineClient:
    """One engine process, its tokenizer, and the streams of the requests it holds."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        tokenizer: Tokenizer,
        *,
        max_unread_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.is_alive = True
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameDecoder(FromEngine)
        self._max_unread_tokens = max_unread_tokens
        self._outputs: dict[str, OutputQueue] = {}  # key engine request id
        self._ids = itertools.count()
        self._info: EngineInfo | None = None
        self._receiving: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        served_model_name: str | None = None,
        max_unread_tokens: int = 2048,
    ) -> "EngineClient":
        """Start the engine process and wait until its model is loaded.

        Args:
            max_unread_tokens: of a completion that may wait to be taken from `generate`; one more
                ends its stream.

        Raises:
            ConfigError: the settings or the checkpoint cannot be served.
            EngineDeadError: the process died while loading.
        """
        source = await asyncio.to_thread(resolve_source, config.model.model, config.model.revision)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "legato.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_SHORT_SPIN | os.environ,
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(pack_frame(config))
            tokenizer = await asyncio.to_thread(load_tokenizer, source)
            client = cls(process, reader, writer, tokenizer, max_unread_tokens=max_unread_tokens)
            await client._await_ready(served_model_name)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return client

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "set by start()"
        return self._info

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        service: ServiceParams,
        request_id: str,
    ) -> AsyncGenerator[CompletionDelta]:
        """Stream the `params.n` completions of a prompt, merged; a delta's index tells them apart.

        Closing the generator aborts what still runs.

        Raises:
            InvalidRequestError: the request can never be served as asked.
            OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
            RequestFailedError: a step that computed this request failed.
            SlowReaderError: the deltas were not taken for so long that the requests were aborted.
            EngineDeadError: the engine process is gone.
        """
        requests = build_requests(
            prompt_token_ids,
            params,
            service=service,
            request_id=f"{next(self._ids)}-{request_id}",
            info=self.info,
            arrival_time_s=time.monotonic(),
        )
        streams = {
            request.request_id: CompletionStream(i, request, self.tokenizer)
            for i, request in enumerate(requests)
        }
        outputs = OutputQueue(len(requests) * self._max_unread_tokens)
        try:
            self._submit(requests, outputs)
            while streams:
                output = await outputs.get()
                _raise_if_failed(output)
                stream = streams.get(output.request_id)
                if stream is None:
                    continue
                delta = stream.push(output)
                if delta.finish_reason is not None:
                    del streams[output.request_id]
                    self._forget(output.request_id, abort=stream.needs_abort)
                yield delta
        finally:
            for unfinished in streams:
                self._forget(unfinished, abort=True)

    async def close(self) -> None:
        """End the engine process; what still runs in it is lost."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._receiving is not None:
            self._receiving.cancel()

    def _submit(self, requests: list[AddRequest], outputs: OutputQueue) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine process is not running")
        for request in requests:
            self._outputs[request.request_id] = outputs
            self._writer.write(pack_frame(request))

    def _forget(self, request_id: str, *, abort: bool) -> None:
        known = self._outputs.pop(request_id, None) is not None
        if known and abort and self.is_alive:
            self._writer.write(pack_frame(AbortRequest(request_id=request_id)))

    async def _await_ready(self, served_model_name: str | None) -> None:
        messages: list[Any] = []
        while not messages:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise EngineDeadError("the engine process died while loading the model")
            messages = self._frames.feed(data)
        match messages[0]:
            case EngineReady(info):
                self._info = info.renamed(served_model_name)
            case EngineFailed(error, is_user_error):
                raise ConfigError(error) if is_user_error else EngineDeadError(error)
        self._receiving = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        try:
            while data := await self._reader.read(_READ_BYTES):
                for step in self._frames.feed(data):
                    self.stats = step.stats
                    for output in step.outputs:
                        outputs = self._outputs.get(output.request_id)
                        if outputs is not None and not outputs.put(output):
                            self._forget(output.request_id, abort=True)
        except OSError:
            logger.exception("lost the connection to the engine process")
        self.is_alive = False
        for outputs in set(self._outputs.values()):
            outputs.close(EngineDeadError("the engine process ended unexpectedly"))


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.REFUSED:
        raise OverloadedError(
            output.error or "overloaded", retry_after_s=output.retry_after_s or 0.0
        )
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(output.error or "the request failed")
