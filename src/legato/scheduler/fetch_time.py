"""How long blocks take to come from another engine, learned from those that came."""

from legato.core.request import Request
from legato.kv.manager import KVCacheManager

_KEPT = 0.9
"""Share of what was known that is still believed when more has come."""


class FetchTime:
    """What the link between engines makes a request wait for its blocks.

    Waiting for them to be computed there is none of it: that is the other engine's to foresee.

    Attributes:
        token_s: of a token's keys and values; 0 as long as none have come.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._num_tokens = self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """So many tokens came while the link was busy for so long."""
        self._num_tokens = _KEPT * self._num_tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def token_s(self) -> float:
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def seconds(self, request: Request) -> float:
        """Until all is there of a request that has not begun, behind what is on its way."""
        if not request.is_to_be_fetched or not self._num_tokens:
            return 0.0
        return self._kv.num_to_come(request) * self.token_s
