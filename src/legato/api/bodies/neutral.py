"""Fields that change nothing: hints, and the off values of other servers' options.

Routers add some of them to every request. Any other value of an option is refused by its name: that
is better than ignoring it.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from legato.api.bodies.body_model import AtMost, Name, RequestModel, only
from legato.api.job import Warned
from legato.api.limits import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
)
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
    safety_identifier: Name | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: Annotated[dict[str, Any], AtMost(MAX_METADATA)] | None = None
    verbosity: Verbosity | None = None
    spaces_between_special_tokens: bool | None = None  # the tokenizers here never add any

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
    timings_per_token: bool | None = None
    session_id: Name | None = None
    request_id: Name | None = None
    rid: Name | Annotated[list[Name], AtMost(MAX_N)] | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None


class UnaskedOptions(RequestModel):
    """Options that Legato does not have, accepted only if they are off."""

    store: Annotated[bool, only(False)] | None = None
    use_beam_search: Annotated[bool, only(False)] | None = None
    length_penalty: Annotated[float, only(1)] | None = None
    early_stopping: Annotated[bool, only(False)] | None = None
    truncation_side: Annotated[str, only("left")] | None = None
    no_stop_trim: Annotated[bool, only(False)] | None = None
    return_hidden_states: Annotated[bool, only(False)] | None = None


class UnaskedOfChat(RequestModel):
    """Likewise, for chat only."""

    echo: Annotated[bool, only(False)] | None = None
    include_reasoning: Annotated[bool, only(True)] | None = None
    separate_reasoning: Annotated[bool, only(True)] | None = None
    stream_reasoning: Annotated[bool, only(True)] | None = None
    documents: Annotated[list[Any], only([]), AtMost(0)] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any], only({}), AtMost(0)] | None = None
