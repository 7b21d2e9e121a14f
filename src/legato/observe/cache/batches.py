"""Events in portions that all who read them take."""

from collections.abc import Iterable, Iterator

from legato.core.kv_events import BlockStored, KVEvent

_MAX_EVENTS = 1024
"""Of a batch: vllm-router refuses one with four times as many, and with it all that it knew."""
_MAX_TOKENS = 2**20
"""After which a batch ends: as MessagePack, at most 7 MB with the blocks' hashes; it takes 16."""


def batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """In their order, none of them empty."""
    batch: list[KVEvent] = []
    num_tokens = 0
    for event in events:
        batch.append(event)
        num_tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(batch) == _MAX_EVENTS or num_tokens >= _MAX_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch
