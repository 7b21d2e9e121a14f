"""A KV manager with states of recurrent layers."""

from legato.core.plan import ChunkResult, ScheduledChunk
from legato.core.request import Request
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import StateSlots
from tests.kv.requests import request_for

BLOCK_SIZE = 2
DEPTH = 3


def manager(
    num_blocks: int = 24,
    *,
    num_requests: int = 3,
    num_spare_slots: int = 8,
    spacing: int = 8,
    depth: int = DEPTH,
    num_host_states: int = 0,
    num_host_slots: int = 0,
) -> KVCacheManager:
    states = StateSlots(
        num_requests,
        depth,
        num_spare_slots=num_spare_slots,
        unit=min(4, spacing),
        spacing=spacing,
        num_host_slots=num_host_states,
    )
    return KVCacheManager(num_blocks, BLOCK_SIZE, num_host_slots=num_host_slots, states=states)


def planned(kv: KVCacheManager, request: Request, end: int) -> ScheduledChunk:
    start = request.num_scheduled_tokens
    chunk = ScheduledChunk(
        request.request_id, start, end - start, kv.block_ids(request), 0, "prefill"
    )
    request.num_scheduled_tokens = end
    [assigned] = kv.assigned([chunk])
    kv.begin_step()
    return assigned


def landed(kv: KVCacheManager, request: Request, chunk: ScheduledChunk) -> None:
    kv.end_step()
    assert kv.landed(chunk, ChunkResult(chunk.num_tokens)) is not None
    request.num_computed_tokens = chunk.end
    kv.commit(request)


def num_hit(kv: KVCacheManager, prompt: list[int], cache_salt: str | None = None) -> int:
    return kv.lookup.match(request_for("?", [*prompt, -1], cache_salt=cache_salt)).num_tokens
