"""Rounds and their results. In each round, all sides answer the same."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.speculation.client import Figures
from benchmarks.speculation.workloads import MIXED, WORKLOADS, Asked, Edits, RandomTokens


class Round(msgspec.Struct, frozen=True):
    """Attributes: streams: what each asks, one after the other; number: from 0 on."""

    workload: str
    number: int
    streams: list[list[Asked]]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.workload, len(self.streams), self.number


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A round that all sides have answered.

    Attributes:
        itl_slo: that Legato's sides were started with; None without.
        sides: key the side's name; the first is the one that others are compared with.
    """

    workload: str
    num_streams: int
    number: int
    itl_slo: str | None
    sides: dict[str, Figures]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.workload, self.num_streams, self.number


class Size(NamedTuple):
    """Attributes: num_asked: of a stream in a round, one after the other."""

    num_rounds: int
    num_asked: int


def size_of(num_streams: int) -> Size:
    """More for fewer streams, whose rounds are short."""
    if num_streams < 4:
        return Size(num_rounds=5, num_asked=3)
    if num_streams < 16:
        return Size(num_rounds=4, num_asked=2)
    if num_streams < 64:
        return Size(num_rounds=3, num_asked=1)
    return Size(num_rounds=2, num_asked=1)


def plan(workloads: Sequence[str], num_streams: Sequence[int], scale: float) -> list[Round]:
    """Return all rounds. No two ask the same.

    Args:
        scale: as many times the rounds of `size_of`, but at least one.

    Raises:
        ValueError: a workload has not so much to ask.
    """
    rounds = []
    for name in workloads:
        first, others = (Edits(), RandomTokens()) if name == MIXED else (WORKLOADS[name](),) * 2
        for count in num_streams:
            size = size_of(count)
            for number in range(max(1, round(scale * size.num_rounds))):
                asking = [first, *[others] * (count - 1)]
                streams = [workload.stream(size.num_asked) for workload in asking]
                rounds.append(Round(name, number, streams))
    return rounds


def measured_before(path: Path, sides: Sequence[str], itl_slo: str | None) -> list[Measured]:
    """What an earlier run has written of the same sides; a line that was cut off is left out."""
    if not path.exists():
        return []
    found = (_read(line) for line in path.read_bytes().splitlines())
    return [
        one
        for one in found
        if one is not None and list(one.sides) == list(sides) and one.itl_slo == itl_slo
    ]


def append(path: Path, measured: Measured) -> None:
    """Write one more line, behind one that may have been cut off."""
    is_cut = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("ab") as file:
        file.write((b"\n" if is_cut else b"") + msgspec.json.encode(measured) + b"\n")


def _read(line: bytes) -> Measured | None:
    try:
        return msgspec.json.decode(line, type=Measured)
    except msgspec.DecodeError:
        return None


def by_case(rounds: Sequence[Measured]) -> dict[tuple[str, int], list[Measured]]:
    """Key the workload and the number of streams."""
    found: dict[tuple[str, int], list[Measured]] = {}
    for one in rounds:
        found.setdefault((one.workload, one.num_streams), []).append(one)
    return found


def speed_ups(rounds: Sequence[Measured]) -> dict[str, list[float]]:
    """Tokens a second of each side, over those of the first in the same round.

    Args:
        rounds: of one case, with the same sides.
    """
    return {side: [_speed_up(one.sides, side) for one in rounds] for side in rounds[0].sides}


def _speed_up(sides: Mapping[str, Figures], side: str) -> float:
    first = next(iter(sides.values()))
    return sides[side].tokens_per_s / first.tokens_per_s


def same_answers(rounds: Sequence[Measured], side: str) -> float:
    """Share of the answers that are the first side's, too."""
    pairs = [pair for one in rounds for pair in _pairs(one.sides, side)]
    return sum(own == firsts for own, firsts in pairs) / len(pairs)


def _pairs(sides: Mapping[str, Figures], side: str) -> Iterator[tuple[int, int]]:
    first = next(iter(sides.values()))
    return zip(sides[side].answers, first.answers, strict=True)
