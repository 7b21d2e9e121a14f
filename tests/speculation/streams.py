"""Streams as drafters see them, without a scheduler."""

from collections.abc import Iterable

from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.token_ids import token_array
from legato.speculation.drafter import Drafter


def stream(
    prompt: Iterable[int],
    request_id: str = "a",
    *,
    tenant: str = "default",
    cache_salt: str | None = None,
) -> Request:
    message = AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(prompt),
        params=SamplingParams(max_tokens=10**6, seed=0),
        service=ServiceParams(tenant=tenant, cache_salt=cache_salt),
    )
    return Request(message, SloClass(), max_model_len=10**7)


def come(request: Request, token_ids: Iterable[int], drafter: Drafter | None = None) -> None:
    """Append tokens, and tell the drafter of each."""
    for token_id in token_ids:
        request.append(token_id, 0.0)
        if drafter is not None:
            drafter.advance(request)


def proposed(drafter: Drafter, request: Request, most: int = 8) -> list[int]:
    draft = drafter.propose(request, most)
    if draft is None:
        return []
    assert 0 < len(draft.token_ids) == len(draft.chances) <= most
    assert all(0.0 < chance < 1.0 for chance in draft.chances)
    return list(draft.token_ids)
