"""Offline inference: an engine in the caller's own process."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from legato.checkpoint.defaults import within_vocabulary
from legato.checkpoint.source import configured_source
from legato.core.config import DEFAULT_MODEL, EngineConfig
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.pooling import Pooling
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.stats import EngineStats
from legato.engine.build.builder import build_engine
from legato.engine.client.requests import build_requests
from legato.engine.errors import failure
from legato.language.completion import CompletionDelta, CompletionStream
from legato.language.conversation.template import ConversationKeywords, ConversationOptions
from legato.language.embedding import Side, check_dimensions, finished_embedding
from legato.llm.llm_settings import (
    TextConfig,
    llm_config,
    llm_docstring,
    llm_signature,
    takes_conversation_options,
)
from legato.llm.prompts import Message, Prompt, PromptReader, ReadPrompt, text_of
from legato.llm.results import Embedding, EmbeddingOutput, Generation
from legato.llm.shared_engine import SharedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model to generate with.

    Any thread may call it. Calls of several threads run at once: the engine computes the requests
    of all in the same steps, and each call returns the outputs of its own.

    Args:
        model: a Hugging Face folder or hub id, or a path to a GGUF file.
        settings: of the engine, named as in vLLM; `help(LLM.__init__)` lists them.

    Raises:
        TypeError: a setting that does not exist.
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        self._start(*llm_config(model=model, **settings))

    __init__.__doc__ = llm_docstring()
    __init__.__signature__ = llm_signature()  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: EngineConfig, *, skip_tokenizer_init: bool = False) -> "LLM":
        """Make a model from a complete configuration.

        Args:
            config: with the fields that `LLM` takes, by subsystem.
            skip_tokenizer_init: as of `LLM`.
        """
        llm = cls.__new__(cls)
        llm._start(config, TextConfig(skip_tokenizer_init=skip_tokenizer_init))
        return llm

    def _start(self, config: EngineConfig, text_config: TextConfig) -> None:
        source = configured_source(config.model)
        text = text_of(config.model, source, skip_tokenizer_init=text_config.skip_tokenizer_init)
        self._vocabulary = text.vocabulary
        self._engine, self.info = build_engine(config)
        self._shared = SharedEngine(self._engine)
        self._defaults = within_vocabulary(
            text.defaults, text.vocabulary.num_ids, self.info.vocab_size
        )
        self._prompts = PromptReader(text.tokenizer, self.info)
        self._ids = itertools.count()
        if text.tokenizer is not None:
            self._engine.grammars.set_vocabulary(text.vocabulary)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the settings that the model's makers recommend; they are the default."""
        return SamplingParams(**self._defaults.sampling)  # type: ignore[arg-type]

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the model's tokenizer, as transformers' class.

        Raises:
            InvalidRequestError: it was skipped.
        """
        return self._prompts.tokenizer.pretrained

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """As `get_tokenizer()`."""
        return self.get_tokenizer()

    @property
    def stats(self) -> EngineStats:
        """The engine's counters, including preemptions so far."""
        return self._engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Complete prompts, batched; results are in the order of the prompts.

        Args:
            prompts: one prompt or several; each is a text, a `TextPrompt` or a `TokensPrompt`.
            sampling_params: for all prompts, or one each; None takes the model's own.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError: a prompt or setting that can never be served. Of several prompts,
                the message begins with the index of the first such; none has been started.
            RequestFailedError: a request cannot be computed.
            EngineFaultError: the engine can compute no more requests.
        """
        prompt_list = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        readers = [partial(self._prompts.read, prompt) for prompt in prompt_list]
        return self._generated(readers, sampling_params, use_tqdm=use_tqdm)

    @takes_conversation_options
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ConversationKeywords],
    ) -> list[Generation]:
        """Answer one conversation or several; otherwise as `generate`.

        The `message` of a completion has its content, reasoning and tool calls. Their marks stay in
        its text, even if they are special tokens.

        Args:
            messages: one conversation, or a list of them. A message has a "role" and a "content",
                which is a text or a list of text parts, and other keys that the template reads.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            options: fields of `ConversationOptions`.

        Raises:
            InvalidRequestError: as in `generate`, or the template refuses the messages, or they
                have special tokens to refuse.
            RequestFailedError, EngineFaultError: as in `generate`.
        """
        several = not messages or not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        asked = ConversationOptions(**options)
        readers = [
            partial(self._prompts.conversation, conversation, options=asked)
            for conversation in conversations
        ]
        return self._generated(readers, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "right",
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """Return a vector for each prompt, batched; results are in the order of the prompts.

        A vector is made of the hidden states after the final norm.

        Args:
            prompts: as in `generate`.
            pooling: the last token's hidden state, or the mean of all; None for what the setting
                `pooling` or the checkpoint says.
            dimensions: first so many numbers of each vector; None for all.
            normalize: divide each vector by its L2 norm.
            truncate_prompt_tokens: keep so many tokens of each prompt, special tokens around a text
                included; -1 keeps as many as the context has, None all.
            truncation_side: where tokens are dropped.
            use_tqdm: as in `generate`.

        Raises:
            InvalidRequestError, RequestFailedError, EngineFaultError: as in `generate`.
        """
        check_dimensions(dimensions, self.info.hidden_size)
        prompt_list = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        work = []
        for index, prompt in enumerate(prompt_list):
            with _blaming(index, len(prompt_list)):
                work.append(
                    self._prompts.read_pooled(
                        prompt,
                        pooling or self.info.pooling,
                        truncate_prompt_tokens,
                        truncation_side,
                    )
                )
        embeddings: list[Embedding | None] = [None] * len(work)
        with _progress(enabled=use_tqdm) as progress:
            bar = progress.add_task("Embedding", total=len(work), tok_s="")
            for index, delta in self._run(work):
                asked, pooled = work[index], delta.output.pooled
                assert pooled is not None, "a pooled request has one output"
                vector = finished_embedding(pooled, dimensions=dimensions, normalize=normalize)
                embeddings[index] = Embedding(
                    request_id=str(next(self._ids)),
                    prompt=asked.text,
                    prompt_token_ids=asked.token_ids,
                    outputs=EmbeddingOutput(vector.tolist()),
                    num_cached_tokens=delta.output.num_cached_tokens,
                )
                progress.update(bar, advance=1)
        return [embedding for embedding in embeddings if embedding is not None]

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams
    ) -> Iterator[CompletionDelta]:
        """Answer one conversation, yielding deltas; closing the iterator stops the request.

        Args:
            messages: as in `chat`.
            sampling_params: as in `generate`.

        Raises:
            InvalidRequestError, RequestFailedError, EngineFaultError: as in `generate`.
        """
        asked = self._prompts.conversation(messages, sampling_params)
        for _, delta in self._run([asked]):
            yield delta

    def _generated(
        self,
        readers: Sequence[Callable[[SamplingParams], ReadPrompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[Generation]:
        """Args: readers: each reads one prompt, given its sampling settings."""
        params = _params_for_each(
            sampling_params or self.get_default_sampling_params(), len(readers)
        )
        asked = []
        for index, (read, one) in enumerate(zip(readers, params, strict=True)):
            with _blaming(index, len(readers)):
                asked.append(read(one))
        generations = [
            Generation(str(next(self._ids)), read.text, read.token_ids, read.params.n, read.syntax)
            for read in asked
        ]
        self._complete(generations, asked, use_tqdm=use_tqdm)
        return generations

    def _complete(
        self, generations: list[Generation], work: Sequence[ReadPrompt], *, use_tqdm: bool
    ) -> None:
        with _progress(enabled=use_tqdm) as progress:
            bar = progress.add_task(
                "Generating", total=sum(asked.params.n for asked in work), tok_s=""
            )
            started_s, num_tokens = time.perf_counter(), 0
            for index, delta in self._run(work):
                generations[index].outputs[delta.index].add(delta)
                num_tokens += len(delta.token_ids)
                progress.update(
                    bar,
                    advance=delta.finish_reason is not None,
                    tok_s=f"{num_tokens / (time.perf_counter() - started_s):.0f} tok/s",
                )

    def _run(self, work: Sequence[ReadPrompt]) -> Iterator[tuple[int, CompletionDelta]]:
        """Step the engine until all requests end; yields (index in `work`, delta)."""
        own: list[AddRequest] = []
        streams: dict[str, tuple[int, CompletionStream]] = {}  # key: engine request id
        for index, asked in enumerate(work):
            with _blaming(index, len(work)):
                requests = self._requests(asked)
            for i, request in enumerate(requests):
                stream = CompletionStream(i, request, self._vocabulary)
                streams[request.request_id] = index, stream
                own.append(request)
        inbox = self._shared.submit(own)
        try:
            while streams:
                for output in self._shared.take(inbox):
                    if output.request_id not in streams:
                        continue
                    index, stream = streams[output.request_id]
                    delta = _checked(stream, output)
                    if delta.finish_reason is not None:
                        del streams[output.request_id]
                    if stream.needs_abort:
                        self._shared.abort(output.request_id)
                    yield index, delta
        finally:
            self._shared.end(own, streams)

    def _requests(self, asked: ReadPrompt) -> list[AddRequest]:
        return build_requests(
            asked.token_ids,
            asked.params,
            service=asked.service,
            request_id=str(next(self._ids)),
            info=self.info,
            eos_token_ids=self._defaults.eos_token_ids,
            arrival_time_s=time.monotonic(),
            pooling=asked.pooling,
        )


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(f"{num_prompts} prompts, but {len(params)} sampling params")
    return list(params)


@contextmanager
def _blaming(index: int, num_prompts: int) -> Iterator[None]:
    """Prefix an InvalidRequestError with the index of its prompt, if there are several."""
    try:
        yield
    except InvalidRequestError as error:
        if num_prompts == 1:
            raise
        message = f"prompt {index}: {error}"
        raise InvalidRequestError(message, param=error.param, code=error.code) from error


def _checked(stream: CompletionStream, output: RequestOutput) -> CompletionDelta:
    if output.finish_reason in (FinishReason.ERROR, FinishReason.REFUSED):
        raise failure(output)
    return stream.push(output)


def _progress(*, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tok_s]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )
