"""The delays of a server beyond the machine's own, and what is to blame for them."""

import bisect
from collections.abc import Sequence

from tests.fuzz.watch import HEALTH, MACHINE, STREAM, Wait


class Delays:
    """What a server let others wait for.

    Args:
        waits: by their ends, as they were written.
        itl_s: what the stream was promised: a token that takes as long is no delay.
    """

    def __init__(self, waits: Sequence[Wait], itl_s: float) -> None:
        self._waits = waits
        self._allowed_s = {HEALTH: 0.0, STREAM: itl_s}
        self._machine = [wait for wait in waits if wait.what == MACHINE]
        self._machine_starts_s = [wait.start_s for wait in self._machine]
        self._machine_ends_s = [wait.end_s for wait in self._machine]

    def worst_s(self, what: str, starts_s: Sequence[float]) -> list[float]:
        """The longest delay of each case.

        Args:
            what: HEALTH or STREAM.
            starts_s: when the cases began, one after the other. A wait is the case's in which its
                middle lies: it may have begun just before.
        """
        worst_s = [0.0] * len(starts_s)
        for wait in self._waits:
            case = bisect.bisect(starts_s, wait.start_s + wait.took_s / 2) - 1
            if wait.what == what and case >= 0 and wait.took_s > worst_s[case]:
                worst_s[case] = max(worst_s[case], self._delay_s(wait))
        return worst_s

    def machine_worst_s(self) -> float:
        """The longest that an idle process took to answer."""
        return max((wait.took_s for wait in self._machine), default=0.0)

    def _delay_s(self, wait: Wait) -> float:
        """By how much it is longer than what was allowed and the machine's longest meanwhile."""
        first = bisect.bisect_left(self._machine_ends_s, wait.start_s)
        end = bisect.bisect_right(self._machine_starts_s, wait.end_s)
        machine_s = max((m.took_s for m in self._machine[first:end]), default=0.0)
        return wait.took_s - self._allowed_s[wait.what] - machine_s
