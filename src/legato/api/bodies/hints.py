"""Fields that change no answer: hints for services, and other servers' settings and options.

What Ollama, OpenRouter and LiteLLM take beside OpenAI's fields is in the requests of Open WebUI,
Cline, Continue, LibreChat and opencode, whichever server they talk to.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from legato.api.bodies.body_model import AtMost, Name, RequestModel, only
from legato.api.job import Warned
from legato.api.limits import MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS
from legato.core.sampling_params import MAX_N

Metadata = Annotated[
    dict[
        Annotated[str, AtMost(MAX_METADATA_KEY_CHARS)],
        Annotated[str, AtMost(MAX_METADATA_VALUE_CHARS)],
    ],
    AtMost(MAX_METADATA),
]


ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
Verbosity = Literal["low", "medium", "high"]


class Hints(RequestModel):
    """A client's notes on a request, for services that use them."""

    user: Name | None = None
    """Changes nothing: the client's note."""
    safety_identifier: Name | None = None
    """Changes nothing: the client's note."""
    metadata: Metadata | None = None
    """Changes nothing: the client's notes."""
    service_tier: ServiceTier | None = None
    """Changes nothing: see `slo_class` and `priority`."""
    prompt_cache_key: Name | None = None
    """Changes nothing: equal prompts share their cache."""
    prompt_cache_retention: CacheRetention | None = None
    """Changes nothing: blocks stay while memory allows."""
    prompt_cache_options: Annotated[dict[str, Any], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: the cache is automatic."""
    verbosity: Verbosity | None = None
    """Changes nothing: say it in the prompt."""
    spaces_between_special_tokens: bool | None = None  # the tokenizers here never add any
    """Changes nothing: there are none."""
    store: bool | None = None
    """Changes nothing: only `/v1/responses` stores answers."""
    prediction: Annotated[dict[str, Any], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: drafts come from the prompt and earlier answers."""

    @property
    def unheeded(self) -> Iterator[Warned]:
        """Warnings about hints that ask for another answer, and get none."""
        if self.service_tier not in (None, "auto", "default"):
            yield Warned(
                "service_tier has no effect; slo_class and priority say how a request is served",
                "service_tier",
            )
        if self.prompt_cache_retention == "24h":
            yield Warned(
                "prompt_cache_retention has no effect: blocks stay while memory allows",
                "prompt_cache_retention",
            )
        if self.verbosity not in (None, "medium"):
            yield Warned("verbosity has no effect; say in the prompt how long to be", "verbosity")
        if self.store:
            yield Warned("store has no effect; only /v1/responses stores answers", "store")
        if self.prediction is not None:
            yield Warned("prediction has no effect; drafts come from the prompt", "prediction")


class PeersHints(RequestModel):
    """Fields of llama.cpp's, SGLang's and vLLM's for their own caches, logs and streams.

    They change nothing: each token is sent when it comes.
    """

    id_slot: int | None = None
    """Changes nothing: for llama.cpp."""
    timings_per_token: bool | None = None
    """Changes nothing: for llama.cpp."""
    session_id: Name | None = None
    """Changes nothing: for SGLang."""
    request_id: Name | None = None
    """Repeated by `/render`; elsewhere, use the header `X-Request-Id`."""
    rid: Name | Annotated[list[Name], AtMost(MAX_N)] | None = None
    """Changes nothing: for SGLang."""
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    """Changes nothing: each token is sent at once."""


class OllamaSettings(RequestModel):
    """How Ollama runs a model; the server's own flags say it here."""

    num_keep: int | None = None
    """Changes nothing: no prompt is cut."""
    num_batch: int | None = None
    """Changes nothing: the server has flags."""
    num_thread: int | None = None
    """Changes nothing: the server has flags."""
    num_gpu: int | None = None
    """Changes nothing: the server has flags."""
    main_gpu: int | None = None
    """Changes nothing: the server has flags."""
    use_mmap: bool | None = None
    """Changes nothing: the server has flags."""
    use_mlock: bool | None = None
    """Changes nothing: the server has flags."""
    numa: bool | None = None
    """Changes nothing: the server has flags."""
    low_vram: bool | None = None
    """Changes nothing: the server has flags."""


class OtherServersHints(OllamaSettings):
    """Settings that Ollama, OpenRouter and LiteLLM take beside OpenAI's fields.

    Chat programs send them to any server. They say where and how a model runs, so no answer here
    depends on them.
    """

    num_ctx: Annotated[int, Field(ge=1)] | None = None
    """Changes nothing: the context is the server's `--max-model-len`."""
    keep_alive: Name | float | None = None
    """Changes nothing: the model stays loaded."""
    provider: Annotated[dict[str, Any], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: there is one provider."""
    models: Annotated[list[Name], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: there is one model."""
    route: Name | None = None
    """Changes nothing: there is one model."""
    transforms: Annotated[list[Name], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: no prompt is cut."""
    drop_params: bool | None = None
    """Changes nothing: for LiteLLM."""
    litellm_session_id: Name | None = None
    """Changes nothing: for LiteLLM."""
    litellm_trace_id: Name | None = None
    """Changes nothing: for LiteLLM."""

    def unheeded_settings(self, max_model_len: int) -> Iterator[Warned]:
        """Yield warnings about settings that ask for something, and get nothing.

        Args:
            max_model_len: the context of the served model, in tokens.
        """
        if self.num_ctx not in (None, max_model_len):
            told = f"num_ctx has no effect; the context has {max_model_len} tokens"
            yield Warned(told, "num_ctx")
        for names, why in _ELSEWHERE:
            sent = [name for name in names if getattr(self, name)]
            if sent:
                verb = "has" if len(sent) == 1 else "have"
                yield Warned(f"{', '.join(sent)} {verb} no effect; {why}", sent[0])


_ELSEWHERE = (
    (
        ("num_batch", "num_thread", "num_gpu", "main_gpu", "use_mlock", "numa", "low_vram"),
        "the server's flags say how the model runs",
    ),
    (("keep_alive",), "the model stays loaded"),
    (("provider", "models", "route"), "this server has one model"),
    (("num_keep", "transforms"), "a prompt that is too long is refused, not cut"),
)
"""Names of fields, and why they have no effect."""


class UnaskedSamplers(RequestModel):
    """Samplers that Legato does not have, accepted only if they are off."""

    mirostat: Annotated[int, only(0)] | None = None
    """Mirostat is not supported."""
    mirostat_eta: float | None = None
    """Changes nothing: for Mirostat."""
    mirostat_tau: float | None = None
    """Changes nothing: for Mirostat."""
    tfs_z: Annotated[float, only(1)] | None = None
    """Tail-free sampling is not supported."""
    typical_p: Annotated[float, only(1)] | None = None
    """Typical sampling is not supported."""


class UnaskedOptions(UnaskedSamplers):
    """Options that Legato does not have, accepted only if they are off."""

    use_beam_search: Annotated[bool, only(False)] | None = None
    """Beam search is not supported."""
    length_penalty: Annotated[float, only(1)] | None = None
    """For beam search."""
    early_stopping: Annotated[bool, only(False)] | None = None
    """For beam search."""
    truncation_side: Annotated[str, only("left")] | None = None
    """The prompt's end is kept."""
    top_a: Annotated[float, only(0)] | None = None
    """Use `min_p`."""
    no_stop_trim: Annotated[bool, only(False)] | None = None
    """Use `include_stop_str_in_output`."""
    return_hidden_states: Annotated[bool, only(False)] | None = None
    """Not returned."""


class UnaskedOfChat(RequestModel):
    """Likewise, for chat only."""

    echo: Annotated[bool, only(False)] | None = None
    """Answers do not repeat the last message."""
    include_reasoning: Annotated[bool, only(True)] | None = None
    """Reasoning is always returned."""
    separate_reasoning: Annotated[bool, only(True)] | None = None
    """Reasoning is always separate."""
    stream_reasoning: Annotated[bool, only(True)] | None = None
    """Reasoning is always streamed."""
    documents: Annotated[list[Any], only([]), AtMost(0)] | None = None
    """Not supported; see `chat_template_kwargs`."""
    mm_processor_kwargs: Annotated[dict[str, Any], only({}), AtMost(0)] | None = None
    """Only text is supported."""
