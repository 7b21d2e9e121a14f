"""Best-effort requests must not starve behind those with a promise."""

_TURN = 10


class PrefillTurns:
    """Offers every tenth prefill chunk to best-effort requests first."""

    def __init__(self) -> None:
        self._num_promised = 0

    @property
    def is_best_efforts(self) -> bool:
        return self._num_promised >= _TURN - 1

    def served(self, *, best_effort: bool) -> None:
        """A prefill chunk was scheduled."""
        self._num_promised = 0 if best_effort else self._num_promised + 1
