"""Splits events into batches that every subscriber accepts."""

from collections.abc import Iterable, Iterator

from legato.core.kv_events import BlockStored, KVEvent

_MAX_EVENTS = 1024
"""Most events of a batch: vllm-router rejects four times as many, and forgets all it knew."""
_MAX_TOKENS = 2**20
"""A batch ends here: as MessagePack, at most 7 MB with the blocks' hashes; the router takes 16."""


def batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Split events into non-empty batches, in order."""
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
