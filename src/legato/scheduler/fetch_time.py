"""Time to fetch blocks from another engine, learned from earlier fetches."""

from legato.core.request import Request
from legato.kv.holds import Holds

_KEPT = 0.9
"""Weight that earlier fetches keep after a new one."""


class FetchTime:
    """Forecasts how long the link between engines delays a request.

    The time until the other engine has computed the blocks is not included: that engine forecasts
    it.

    Attributes:
        token_s: seconds to fetch a token's keys and values; 0 until blocks have arrived.
    """

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._num_tokens = self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record that `num_tokens` arrived while the link was busy for `seconds`."""
        self._num_tokens = _KEPT * self._num_tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def token_s(self) -> float:
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def seconds(self, request: Request) -> float:
        """Return the seconds until a waiting request's blocks arrive, after those in transit."""
        if not request.is_to_be_fetched or not self._num_tokens:
            return 0.0
        return self._holds.num_to_come(request) * self.token_s
