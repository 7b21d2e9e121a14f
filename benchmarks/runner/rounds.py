"""Sides that take turns, so that what else the machine does falls on all of them alike."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(sides: Sequence[T], number: int) -> list[T]:
    """The sides in the order of a round: each begins as often as the others do."""
    start = number % len(sides)
    return [*sides[start:], *sides[:start]]


def turns(sides: Sequence[T], num_rounds: int) -> Iterator[tuple[int, T]]:
    """Every turn of all rounds, with the number of its round, from 0 on."""
    for number in range(num_rounds):
        for side in in_turn(sides, number):
            yield number, side
