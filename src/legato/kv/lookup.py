"""Looks up the blocks that a request would share, before it has any."""

from legato.core.request import Request
from legato.core.step_record import Lack, ShortHit
from legato.kv.prefix_node import SoughtTokens, Way
from legato.kv.prefix_tree import PrefixTree
from legato.kv.state_slots import StateSlots
from legato.kv.window_groups import WindowGroups


class PrefixLookup:
    """Finds the beginning of a request in the prefix tree. It changes nothing there.

    Args:
        enable_prefix_caching: False finds nothing.
        states, windows: as in `KVCacheManager`. A hit ends where the states have a checkpoint, and
            where all windows find their blocks.
    """

    def __init__(
        self,
        tree: PrefixTree,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        states: StateSlots | None = None,
        windows: WindowGroups | None = None,
    ) -> None:
        self.block_size = block_size
        self._tree = tree
        self._is_sharing = enable_prefix_caching
        self._states = states
        self._windows = windows

    def match(self, request: Request) -> Way:
        """Look up the tokens that a request would share."""
        return self.cut(self.cached(request))

    def cached(self, request: Request) -> Way:
        """Look up the tokens of a request that are in the tree, wherever a hit may end."""
        known = request.found if isinstance(request.found, Way) else None
        end = self.num_shareable(request)
        request.found = way = self._tree.match(self.sought(request), end, known=known)
        return way

    def cut(self, way: Way) -> Way:
        """Cut a path of the tree to where a hit may end."""
        num_tokens = -1
        while way.num_tokens != num_tokens:
            num_tokens = way.num_tokens
            if self._states is not None:
                way = self._states.checkpoints.cut(way)
            if self._windows is not None:
                way = self._windows.cut(way)
        return way

    def short_hit(self, found: Way) -> ShortHit | None:
        """Describe a hit that is shorter than the cached blocks; None if it is not."""
        if found.num_tokens == found.num_matched_tokens:
            return None
        lacks: Lack = "window" if self._states is None else "checkpoint"
        return ShortHit(found.num_tokens, found.num_matched_tokens, lacks)

    def num_hit_tokens(self, request: Request) -> int:
        """Return the tokens that a request without blocks need not compute."""
        if request.is_to_be_fetched:
            return self.num_shareable(request)
        return self.match(request).num_tokens

    def num_shareable(self, request: Request) -> int:
        """Return the tokens in the blocks at its start that a request may share."""
        reads_all_rows = (
            request.params.prompt_logprobs is not None or request.message.pooling == "mean"
        )
        if not self._is_sharing or (reads_all_rows and not request.num_output_tokens):
            return 0  # tokens that it does not compute cannot be scored, or pooled
        return (request.num_tokens - 1) // self.block_size * self.block_size

    def sought(self, request: Request) -> SoughtTokens:
        """Return the request's tokens as the tree looks them up."""
        salt = request.message.service.block_salt
        return SoughtTokens(request.token_ids, self.block_size, salt)
