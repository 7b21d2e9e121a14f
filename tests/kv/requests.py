"""Requests as the KV manager sees them."""

from array import array
from collections.abc import Sequence
from typing import Any

from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.token_ids import token_array


class CountedTokens(array):  # type: ignore[type-arg]
    """A row that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, part: Any) -> Any:
        found = super().__getitem__(part)
        self.num_read += len(found) if isinstance(part, slice) else 1
        return found


def request_for(
    request_id: str,
    prompt: Sequence[int],
    *,
    cache_salt: str | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    message = AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(prompt),
        params=SamplingParams(max_tokens=1000, seed=0, prompt_logprobs=prompt_logprobs),
        service=ServiceParams(cache_salt=cache_salt),
    )
    return Request(message, SloClass(), max_model_len=100_000)
