"""How durations are written on the command line."""

import argparse
import re
from fractions import Fraction

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
# Fractions, so that 35ms is 0.035 and not the float beside it.
_UNITS_S: dict[str | None, Fraction] = {
    None: Fraction(1),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}


def duration_s(text: str) -> float:
    """Seconds in a duration such as 100ms, 1.5s, 2m or 1h; a plain number is in seconds.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 100ms or 1.5s")
    return float(Fraction(match[1]) * _UNITS_S[match[2]])
