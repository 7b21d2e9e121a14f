"""Thinking budgets as a reader of the whole output would hold them."""

from collections.abc import Sequence

from legato.core.sampling_params import ThinkingLimit


class Thoughts:
    """What is given to an output that runs alone, found by reading all of it again each time."""

    def __init__(self, limit: ThinkingLimit | None) -> None:
        self._limit = limit
        self._given: list[tuple[int, int]] = []  # where given tokens begin and end

    def after(self, output: Sequence[int]) -> tuple[int, ...]:
        """The tokens given after these."""
        limit = self._limit
        if limit is None or limit.budget is None:
            return ()
        num_thought, is_open = self.read(output)
        most = limit.budget - (0 if self._given else limit.num_said)
        grace = min(64, max(0, limit.budget - limit.num_said) // 20)
        is_break = output[-1] in limit.breaks and num_thought >= most - grace
        if not is_open or not (num_thought >= most or (is_break and not self.begins(output))):
            return ()
        forced = limit.forced_again if self._given else limit.forced
        self._given.append((len(output), len(output) + len(forced)))
        return forced

    def begins(self, output: Sequence[int]) -> bool:
        assert self._limit is not None
        return any(tuple(output[-len(begin) :]) == begin for begin in self._limit.begins)

    def read(self, output: Sequence[int]) -> tuple[int, bool]:
        """How many tokens are thinking, and whether a thought is open at the end."""
        assert self._limit is not None
        limit, is_open, num_thought = self._limit, self._limit.is_open, 0
        starts = {start: number for number, (start, _) in enumerate(self._given)}
        place = 0
        while place < len(output):
            if place in starts:
                num_thought += 0 if starts[place] else limit.num_said
                is_open, place = False, self._given[starts[place]][1]
                continue
            if is_open and output[place] not in limit.ends:
                num_thought += 1
            else:
                is_open = self.begins(output[: place + 1])
            place += 1
        return num_thought, is_open
