"""Online inference: the server's engine, in its own process, for an asyncio program."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from legato.checkpoint.source import configured_source
from legato.core.config import DEFAULT_MODEL, EngineConfig
from legato.core.errors import InvalidRequestError
from legato.core.outputs import RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats
from legato.core.vocabulary import Vocabulary
from legato.engine.client.client import EngineClient
from legato.engine.client.requests import build_requests
from legato.engine.client.submissions import Submission
from legato.language.completion import CompletionStream
from legato.language.conversation.template import ConversationKeywords, ConversationOptions
from legato.llm.llm_settings import (
    TextConfig,
    llm_config,
    llm_docstring,
    llm_signature,
    takes_conversation_options,
)
from legato.llm.prompts import Message, Prompt, PromptReader, ReadPrompt, text_of
from legato.llm.results import Generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ONLINE: Mapping[str, Any] = {}
"""As the server's: the queue is bounded, and requests beyond it are refused."""


class AsyncLLM:
    """A model to generate with from an asyncio program, with the promises that a server keeps.

    The engine is the server's: a process of its own. The caller's program cannot delay its steps,
    and it is restarted if it dies. `start`, `async with` or the first request starts it. All calls
    come from the event loop that started it; a call from another one raises `RuntimeError`.

    Args:
        model: as of `LLM`.
        settings: of the engine, as of `LLM`.

    Raises:
        TypeError: a setting that does not exist.
        ConfigError: settings that contradict each other.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        self._set_up(*llm_config(_ONLINE, model=model, **settings))

    __init__.__doc__ = llm_docstring(_ONLINE)
    __init__.__signature__ = llm_signature(_ONLINE)  # type: ignore[attr-defined]

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineConfig, *, skip_tokenizer_init: bool = False
    ) -> "AsyncLLM":
        """Make a model from a complete configuration.

        Args:
            engine_args: for example from `EngineConfig.of(model=..., itl_slo_s=0.1)`.
            skip_tokenizer_init: as of `AsyncLLM`.
        """
        llm = cls.__new__(cls)
        llm._set_up(engine_args, TextConfig(skip_tokenizer_init=skip_tokenizer_init))
        return llm

    def _set_up(self, config: EngineConfig, text: TextConfig) -> None:
        self._config = config
        self._text = text
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EngineClient | None = None
        self._running: dict[str, _Growing] = {}  # key: request id
        self._ids, self._prompt_numbers = itertools.count(), itertools.count()

    async def start(self) -> None:
        """Load the model, unless it is loaded already.

        Raises:
            ConfigError: settings that contradict the model or the machine.
            UnsupportedModelError: a checkpoint that cannot be run.
            EngineDeadError: the engine process died while loading.
        """
        self._check_loop()
        async with self._starting:
            if self._client is None:
                self._client = await self._started()

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        service: ServiceParams | None = None,
    ) -> AsyncGenerator[Generation]:
        """Complete a prompt; yields the whole completion so far, whenever there is more of it.

        Leaving the loop, or cancelling its task, stops the request. A slow consumer gets everything
        that came meanwhile at once.

        Args:
            prompt: a text, a `TextPrompt` or a `TokensPrompt`.
            sampling_params: None takes the model's own.
            request_id: for `abort`; unique among the running requests. None makes one.
            service: how to serve it beside others: its class, tenant and priority.

        Raises:
            InvalidRequestError: it can never be served as asked.
            OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
            RequestFailedError: it cannot be computed.
            EngineDeadError: the engine process died during the request, or was shut down.
            ConfigError, UnsupportedModelError: as `start`, which it calls.
        """

        def read(defaults: SamplingParams) -> ReadPrompt:
            return self._prompts.read(prompt, sampling_params or defaults, service)

        return self._answered(read, request_id)

    @takes_conversation_options
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        service: ServiceParams | None = None,
        **options: Unpack[ConversationKeywords],
    ) -> AsyncGenerator[Generation]:
        """Answer a conversation; otherwise as `generate`.

        Args:
            messages: as of `LLM.chat`.
            sampling_params, request_id, service: as of `generate`.
            options: fields of `ConversationOptions`.

        Raises:
            InvalidRequestError: as in `generate`, or the template refuses the messages, or they
                have special tokens to refuse.
            Exception: as `generate`.
        """

        asked = ConversationOptions(**options)

        def read(defaults: SamplingParams) -> ReadPrompt:
            return self._prompts.conversation(
                messages, sampling_params or defaults, service, options=asked
            )

        return self._answered(read, request_id)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Stop requests; their last output has the finish reason "abort".

        Args:
            request_id: one or several; ids of requests that are not running are ignored.
        """
        self._check_loop()
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._running:
                self._running[one].abort()

    async def shutdown(self) -> None:
        """End the engine process; running requests end with `EngineDeadError`."""
        self._check_loop()
        async with self._starting:
            if self._client is not None:
                await self._client.close()

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if there is no engine at the moment."""
        self._engine.check_running()

    async def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the model's tokenizer, as transformers' class.

        Raises:
            InvalidRequestError: it was skipped.
        """
        await self.start()
        return self._prompts.tokenizer.pretrained

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the settings that the model's makers recommend; they are the default."""
        return SamplingParams(**self._engine.defaults.sampling)  # type: ignore[arg-type]

    @property
    def stats(self) -> EngineStats:
        """The engine's counters after its latest step."""
        return self._engine.stats

    def _check_loop(self) -> None:
        """Raises `RuntimeError` in another event loop than the first: it would wait for ever."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError("this AsyncLLM belongs to another event loop: make one in each")

    @property
    def _engine(self) -> EngineClient:
        if self._client is None:
            raise RuntimeError("the engine has not been started; await start()")
        return self._client

    async def _started(self) -> EngineClient:
        model = self._config.model
        source = await asyncio.to_thread(configured_source, model)
        loading = asyncio.create_task(
            asyncio.to_thread(
                text_of, model, source, skip_tokenizer_init=self._text.skip_tokenizer_init
            )
        )

        async def text() -> Any:
            _, vocabulary, defaults = await loading
            return vocabulary, defaults

        client = await EngineClient.start(self._config, text())
        self._prompts = PromptReader(loading.result().tokenizer, client.info)
        return client

    async def _answered(
        self, read: Callable[[SamplingParams], ReadPrompt], request_id: str | None
    ) -> AsyncGenerator[Generation]:
        """Run one request; a single generator, so that closing it also stops the request."""
        await self.start()
        # In a thread: reading a long prompt takes as long as several steps.
        asked = await asyncio.to_thread(read, self.get_default_sampling_params())
        if request_id is None:
            request_id = next(one for one in map(str, self._ids) if one not in self._running)
        if request_id in self._running:
            raise InvalidRequestError(f"a request {request_id!r} runs already", param="request_id")
        generation = Generation(
            request_id, asked.text, asked.token_ids, asked.params.n, asked.syntax
        )
        growing = _Growing(generation)
        self._running[request_id] = growing
        try:
            requests = growing.begun(self._requests(asked, request_id), self._engine.vocabulary)
            async with self._engine.submitted(requests, growing.take) as submission:
                growing.end_with(submission)
                is_whole = False
                while not is_whole:
                    await growing.has_more.wait()
                    growing.has_more.clear()
                    submission.check()
                    so_far = growing.so_far.snapshot()
                    is_whole = so_far.finished
                    yield so_far
        finally:
            growing.forget()
            del self._running[request_id]

    def _requests(self, asked: ReadPrompt, request_id: str) -> list[AddRequest]:
        return build_requests(
            asked.token_ids,
            asked.params,
            service=asked.service,
            request_id=f"{next(self._prompt_numbers)}-{request_id}",
            info=self._engine.info,
            eos_token_ids=self._engine.defaults.eos_token_ids,
            arrival_time_s=time.monotonic(),
        )


class _Growing:
    """A generation in progress.

    Attributes:
        has_more: set when there is a new delta, or the end.
    """

    def __init__(self, generation: Generation) -> None:
        self.so_far = generation
        self.has_more = asyncio.Event()
        self._streams: list[CompletionStream] = []  # of each completion
        self._ended: asyncio.Task[Any] | None = None

    def begun(self, requests: Sequence[AddRequest], vocabulary: Vocabulary) -> Iterator[AddRequest]:
        """Yield the requests of the completions; outputs of each may come from then on."""
        for index, request in enumerate(requests):
            self._streams.append(CompletionStream(index, request, vocabulary))
            yield request

    def take(self, index: int, output: RequestOutput, received_s: float) -> bool:
        stream = self._streams[index]
        delta = stream.push(output, received_s)
        if not self.so_far.finished:  # an aborted generation stays as it was
            self.so_far.outputs[index].add(delta)
            self.has_more.set()
        return not stream.needs_abort

    def abort(self) -> None:
        self.so_far.end_as_aborted()
        self.has_more.set()

    def end_with(self, submission: Submission) -> None:
        """Set `has_more` when the submission ends, also by an error."""
        self._ended = asyncio.create_task(submission.ended.wait())
        self._ended.add_done_callback(lambda _: self.has_more.set())

    def forget(self) -> None:
        if self._ended is not None:
            self._ended.cancel()


AsyncEngineArgs: Callable[..., EngineConfig] = EngineConfig.of
"""vLLM's name for the function that makes the settings of `AsyncLLM.from_engine_args`."""
