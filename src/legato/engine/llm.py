"""Offline inference: an engine in the caller's own process."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NotRequired, TypedDict, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from legato.core.config import (
    DEFAULT_MODEL,
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    Kernels,
    ModelConfig,
    Policy,
    Quantization,
    SchedulerConfig,
)
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats
from legato.engine.errors import RequestFailedError
from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.engine.frontend.completion_stream import CompletionStream
from legato.engine.frontend.requests import build_requests
from legato.engine.startup.build import build_engine


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already; `cache_salt` as in `ServiceParams`."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


class TextPrompt(TypedDict):
    """A prompt as text; without a `cache_salt` the same as the text itself."""

    prompt: str
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt
Message = dict[str, Any]  # keys "role" and "content"

_Work = tuple[Sequence[int], SamplingParams, ServiceParams]


class Generation:
    """A prompt and its completions.

    Attributes:
        prompt: its text, None where it was given as tokens.
        outputs: one completion for each of `SamplingParams.n`.
    """

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], num_outputs: int) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [Completion(i) for i in range(num_outputs)]


class LLM:
    """A model to generate with; arguments are named as in vLLM.

    Args:
        model: a Hugging Face folder or hub id, or a path to a GGUF file.
        kv_cache_memory_bytes: size of the KV cache, on a CPU taken at once; None allows it a
            fraction of the free memory.
        gpu_memory_utilization: that fraction, in (0, 1].
        swap_space_bytes: of host memory, for blocks that are evicted from the cache.
        admission_optimism: how little room is kept for what running requests still generate, in
            [0, 1]: at 0 for all that they may, at 1 for the next token.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        dtype: DType = "auto",
        device: Device = "auto",
        max_model_len: int | None = None,
        block_size: int = 32,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        swap_space_bytes: int = 0,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int = 64,
        enable_chunked_prefill: bool = True,
        policy: Policy = "stall-free",
        admission_optimism: float = 0.5,
        num_threads: int | None = None,
        quantization: Quantization | None = None,
        kernels: Kernels = "auto",
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=model,
                revision=revision,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                num_threads=num_threads,
                quantization=quantization,
                kernels=kernels,
            ),
            cache=CacheConfig(
                block_size=block_size,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                memory_utilization=gpu_memory_utilization,
                enable_prefix_caching=enable_prefix_caching,
                swap_space_bytes=swap_space_bytes,
            ),
            scheduler=SchedulerConfig(
                policy=policy,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                enable_chunked_prefill=enable_chunked_prefill,
                admission_optimism=admission_optimism,
                max_waiting=2**31,  # the caller waits for all of them anyway
            ),
        )
        self._start(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        """The same, from settings that are put together already."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self._engine, self.info, self._tokenizer = build_engine(config)
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend; used where no settings are given."""
        return SamplingParams(**self.info.default_sampling)  # type: ignore[arg-type]

    @property
    def stats(self) -> EngineStats:
        """The engine's counters, among them the preemptions so far."""
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
            sampling_params: for all prompts, or one each; None takes the model's own.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError: a prompt or setting that can never be served.
            RequestFailedError: a request cannot be computed.
            EngineFaultError: nothing can be computed any more.
        """
        prompt_list = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        params = _params_for_each(
            sampling_params or self.get_default_sampling_params(), len(prompt_list)
        )
        generations = [
            Generation(*self._tokenize(prompt), num_outputs=p.n)
            for prompt, p in zip(prompt_list, params, strict=True)
        ]
        work = [
            (generation.prompt_token_ids, p, _service(prompt))
            for generation, p, prompt in zip(generations, params, prompt_list, strict=True)
        ]
        self._complete(generations, work, use_tqdm=use_tqdm)
        return generations

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[Generation]:
        """Answer one conversation or several; otherwise as `generate`."""
        several = not messages or not isinstance(messages[0], dict)
        conversations: Any = messages if several else [messages]
        prompts: list[Prompt] = [
            TokensPrompt(
                prompt_token_ids=self._tokenizer.apply_chat_template(
                    list(conversation),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                )
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams
    ) -> Iterator[CompletionDelta]:
        """Answer one conversation, as the text comes; closing the iterator stops the request."""
        token_ids = self._tokenizer.apply_chat_template(list(messages))
        for _, delta in self._run([(token_ids, sampling_params, ServiceParams())]):
            yield delta

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        match prompt:
            case {"prompt_token_ids": token_ids}:
                return None, list(cast("Sequence[int]", token_ids))
            case {"prompt": str(text)} | str(text):
                return text, self._tokenizer.encode(text)
        raise InvalidRequestError(f"a prompt is a text or token ids, got {prompt!r}")

    def _complete(
        self, generations: list[Generation], work: Sequence[_Work], *, use_tqdm: bool
    ) -> None:
        with _progress(enabled=use_tqdm) as progress:
            bar = progress.add_task("Generating", total=sum(p.n for _, p, _ in work), tok_s="")
            started_s, num_tokens = time.perf_counter(), 0
            for index, delta in self._run(work):
                generations[index].outputs[delta.index].add(delta)
                num_tokens += len(delta.token_ids)
                progress.update(
                    bar,
                    advance=delta.finish_reason is not None,
                    tok_s=f"{num_tokens / (time.perf_counter() - started_s):.0f} tok/s",
                )

    def _run(self, work: Sequence[_Work]) -> Iterator[tuple[int, CompletionDelta]]:
        """Step the engine until all is done; yields (index in `work`, delta)."""
        events: list[Event] = []
        streams: dict[str, tuple[int, CompletionStream]] = {}  # key engine request id
        for index, asked in enumerate(work):
            for i, request in enumerate(self._requests(*asked)):
                stream = CompletionStream(i, request, self._tokenizer)
                streams[request.request_id] = index, stream
                events.append(request)
        try:
            while streams:
                outputs = self._engine.step(events)
                events = []
                for output in outputs:
                    if output.request_id not in streams:
                        continue
                    index, stream = streams[output.request_id]
                    delta = _checked(stream, output)
                    if delta.finish_reason is not None:
                        del streams[output.request_id]
                    if stream.needs_abort:
                        events.append(AbortRequest(request_id=output.request_id))
                    yield index, delta
        finally:
            events += [AbortRequest(request_id=request_id) for request_id in streams]
            self._engine.apply(events)

    def _requests(
        self, token_ids: Sequence[int], params: SamplingParams, service: ServiceParams
    ) -> list[AddRequest]:
        return build_requests(
            token_ids,
            params,
            service=service,
            request_id=str(next(self._ids)),
            info=self.info,
            arrival_time_s=time.monotonic(),
        )


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(f"{num_prompts} prompts, but {len(params)} sampling params")
    return list(params)


def _service(prompt: Prompt) -> ServiceParams:
    salt = None if isinstance(prompt, str) else prompt.get("cache_salt")
    return ServiceParams(cache_salt=salt)


def _checked(stream: CompletionStream, output: RequestOutput) -> CompletionDelta:
    if output.finish_reason in (FinishReason.ERROR, FinishReason.REFUSED):
        raise RequestFailedError(output.error or "the request failed")
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
