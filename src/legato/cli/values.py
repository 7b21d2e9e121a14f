"""Parsers of values on the command line.

All raise argparse.ArgumentTypeError if the text is not such a value.
"""

import argparse
import math
import re
from fractions import Fraction
from pathlib import Path

from legato.core.errors import ConfigError
from legato.core.slo import LEAST_QUANTILE, MOST_QUANTILE, P99, SloClass, percentile

SLO_CLASS = "NAME:itl=TIME[:pQ],tpot=TIME,ttft=TIME"
"""The form of a class in usage messages."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
# Exact fractions, so that 35ms is 0.035 and not the float beside it.
_UNITS_S = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
# A name may contain colons, if another follows.
_SLO_CLASS = re.compile(r"([^:]+|.+(?=:))(?::((?:(?:itl|tpot|ttft)=[^,=]*(?:,|$))*))?", re.DOTALL)
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")
_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def filled(text: str) -> str:
    """Return a text that is not blank, as a shell's unset variable would make it."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; leave the flag out to take the default")
    return text


def integer(text: str) -> int:
    """Parse a whole number of either sign."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Parse a number, inf and nan included."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def count(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count_or_word(text: str) -> int | str:
    """Parse a whole number above 0, or a word, which its field checks."""
    return count(text) if text.isdecimal() else text


def whole(text: str) -> int:
    """Parse a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def positive(text: str) -> float:
    """Parse a number above 0, inf included."""
    value = number(text)
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def finite(text: str) -> float:
    """Parse a number above 0, without inf."""
    value = positive(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not finite")
    return value


def rates(text: str) -> list[float]:
    """Parse finite numbers above 0 between commas, each once."""
    found = [positive(value) for value in listed(text)]
    if not all(map(math.isfinite, found)):
        raise argparse.ArgumentTypeError(f"{text!r} has a rate that is not finite")
    return list(dict.fromkeys(found))


def counts(text: str) -> list[int]:
    """Parse whole numbers above 0 between commas, each once."""
    return list(dict.fromkeys(count(value) for value in listed(text)))


def fraction(text: str) -> float:
    """Parse a number in [0, 1)."""
    value = number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return value


def share(text: str) -> float:
    """Parse a number in (0, 1]."""
    value = number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not in (0, 1]")
    return value


def slack(text: str) -> float:
    """Parse a percentage from 0% on, such as 5%, or "unbounded", to a fraction."""
    if text == "unbounded":
        return math.inf
    match = _PERCENTAGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 5%, or unbounded")
    return _rounded(Fraction(match[1]) / 100)


def duration_s(text: str) -> float:
    """Parse a duration such as 100ms, 1.5s, 2m or 1h to seconds; only 0 needs no unit."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 100ms or 1.5s")
    number, unit = Fraction(match[1]), match[2]
    if unit is None and number:
        raise argparse.ArgumentTypeError(f"{match[1]} of what? {match[1]}ms, or {match[1]}s?")
    return _rounded(number * _UNITS_S[unit or "s"])


def _rounded(exact: Fraction) -> float:
    """Return the nearest float; infinity beyond all."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf


def gap_bound(text: str) -> tuple[float | None, float, bool]:
    """Parse auto, off, TIME or TIME:pPERCENT.

    Returns:
        the promised seconds; the share of gaps that they apply to; whether gaps are bounded without
        a promise.
    """
    if text in ("auto", "off"):
        return None, P99, text == "auto"
    return *gap_promise(text), False


def gap_promise(text: str) -> tuple[float, float]:
    """Parse TIME or TIME:pPERCENT to seconds and the share of gaps that they apply to."""
    time, _, percent = text.partition(":")
    if not percent:
        return duration_s(time), P99
    match = _PERCENTILE.fullmatch(percent)
    quantile = float(Fraction(match[1]) / 100) if match else 0.0
    if not LEAST_QUANTILE <= quantile <= MOST_QUANTILE:
        raise argparse.ArgumentTypeError(
            f"{percent!r} is not a percentile from {percentile(LEAST_QUANTILE)} to "
            f"{percentile(MOST_QUANTILE)}, such as {percentile(P99)}"
        )
    return duration_s(time), quantile


def byte_size(text: str) -> int:
    """Parse a size such as 512M, 2GiB or 1000000 to bytes, at least 1; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = int(Fraction(match[1]) * _UNITS_BYTES[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G")
    return size


def listed(text: str) -> list[str]:
    """Parse values between commas, at least one."""
    values = [value for value in text.split(",") if value]
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} holds no value")
    return values


def lines_of(path: str) -> list[str]:
    """Return the words of a file, usually one a line; at least one."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read: {reason}") from error
    if not lines:
        raise argparse.ArgumentTypeError(f"{path} is empty")
    return lines


def slo_class(text: str) -> dict[str, SloClass]:
    """Parse a class from NAME:itl=TIME[:pQ],tpot=TIME,ttft=TIME; only the name is required."""
    match = _SLO_CLASS.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SLO_CLASS}")
    name, promises = match.groups(default="")
    given: dict[str, float] = {}
    for promise in filter(None, promises.split(",")):
        kind, _, time = promise.partition("=")
        if kind == "itl":
            given["itl_s"], given["itl_quantile"] = gap_promise(time)
        else:
            given[f"{kind}_s"] = duration_s(time)
    try:
        return {name: SloClass(**given)}
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def weights(text: str) -> dict[str, float]:
    """Parse weights by name from NAME=WEIGHT, or several with commas between."""
    given: dict[str, float] = {}
    for part in listed(text):
        name, is_told, weight = part.partition("=")
        if not is_told:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=WEIGHT")
        given[name] = positive(weight)
    return given
