"""Requests as the scheduler holds them, without a scheduler."""

from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.tenant import DEFAULT_TENANT
from legato.core.token_ids import token_array

MAX_MODEL_LEN = 100_000


def waiting_request(
    request_id: str = "r",
    *,
    arrival_s: float = 0.0,
    prompt_len: int = 10,
    priority: int = 0,
    tenant: str = DEFAULT_TENANT,
    slo: SloClass | None = None,
    max_tokens: int = 8,
) -> Request:
    """A request before its first step; best-effort unless `slo` says else."""
    message = AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array([1]) * prompt_len,
        params=SamplingParams(max_tokens=max_tokens, seed=0),
        service=ServiceParams(priority=priority, tenant=tenant),
        arrival_time_s=arrival_s,
    )
    return Request(message, slo or SloClass(), max_model_len=MAX_MODEL_LEN)
