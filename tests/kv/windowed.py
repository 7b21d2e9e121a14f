"""A KV manager whose layers have two windows."""

from legato.kv.manager import KVCacheManager
from legato.kv.window_group import WindowGroup
from legato.kv.window_groups import WindowGroups
from legato.kv.window_need import WindowNeed
from tests.kv.cache_watcher import CacheWatcher
from tests.kv.requests import request_for

BLOCK_SIZE = 2
WINDOWS = (4, 7)
MOST_ROWS = 6
"""Most tokens of all chunks in flight."""
MAX_REQUESTS = 3


def manager(
    num_blocks: int = 16,
    *,
    is_caching: bool = True,
    num_host_slots: int = 0,
    max_requests: int = MAX_REQUESTS,
    num_lent: int = 0,
) -> KVCacheManager:
    """Args: num_lent: for how many requests transfers may have blocks of windows."""
    needs = [
        WindowNeed.of(w, block_bytes=1, block_size=BLOCK_SIZE, rows_in_flight=MOST_ROWS, longest=99)
        for w in WINDOWS
    ]
    groups = [
        WindowGroup(
            n.window,
            n.num_blocks(max_requests + num_lent),
            BLOCK_SIZE,
            num_host_slots=num_host_slots // 2,
            num_spare=n.num_blocks(max_requests + num_lent) - n.num_blocks(max_requests),
        )
        for n in needs
    ]
    windows = WindowGroups(groups, block_size=BLOCK_SIZE, max_requests=max_requests)
    return KVCacheManager(
        num_blocks,
        BLOCK_SIZE,
        enable_prefix_caching=is_caching,
        num_host_slots=num_host_slots,
        windows=windows,
    )


def check_ends(kv: KVCacheManager, watcher: CacheWatcher) -> None:
    """Of each cached path, the last end that was told is where the manager's hit ends."""
    ends = watcher.ends()
    # Otherwise no request can begin, and blocks in host memory may not come back for one.
    can_begin = kv.windows.has_place and not kv.windows._leaving
    for _, tokens in watcher.prompts():
        believed = max((len(end) for end in ends if tokens[: len(end)] == end), default=0)
        found = kv.lookup.match(request_for("?", [*tokens, -1])).num_tokens
        assert found == believed or (not can_begin and found < believed)
