"""Fields that change nothing: hints, and the off values of other servers' options.

Routers add some of them to every request. Any other value of an option is refused by its name: that
is better than ignoring it.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from legato.core.sampling_params import MAX_N
from legato.server.limits import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
)
from legato.server.requests.outcome import Warned
from legato.server.requests.request_model import AtMost, Name, RequestModel, only

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
    """Changes nothing: the client's note; `/v1/responses` repeats it."""
    safety_identifier: Name | None = None
    """Changes nothing: the client's note; `/v1/responses` repeats it."""
    metadata: Metadata | None = None
    """Changes nothing: the client's notes; `/v1/responses` repeats them."""
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

    @property
    def unheeded(self) -> Iterator[Warned]:
        """Warnings about hints that ask for another answer, and get none."""
        if self.service_tier not in (None, "auto", "default"):
            yield Warned(
                "service_tier has no effect; slo_class and priority say how a request is served",
                "service_tier",
            )
        if self.verbosity not in (None, "medium"):
            yield Warned("verbosity has no effect; say in the prompt how long to be", "verbosity")


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


class UnaskedOptions(RequestModel):
    """Options that Legato does not have, accepted only if they are off."""

    store: Annotated[bool, only(False)] | None = None
    """Answers are not stored."""
    use_beam_search: Annotated[bool, only(False)] | None = None
    """Beam search is not supported."""
    length_penalty: Annotated[float, only(1)] | None = None
    """For beam search."""
    early_stopping: Annotated[bool, only(False)] | None = None
    """For beam search."""
    truncation_side: Annotated[str, only("left")] | None = None
    """The prompt's end is kept."""
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
