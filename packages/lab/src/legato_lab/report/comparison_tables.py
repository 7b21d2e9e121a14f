"""Tables of two runs side by side, with their differences in percent."""

from collections.abc import Sequence

from legato.cli.table import NOTHING, Table, duration
from legato_lab.comparison import Difference, Unit, Unlike


def comparison_table(
    title: str, names: tuple[str, str], differences: Sequence[Difference]
) -> Table:
    """Return the figures of two runs, and their differences."""
    header = ["", *names, "difference", "95 % interval", ""]
    return Table(title, header, [_row(difference) for difference in differences])


def unlike_table(names: tuple[str, str], unlikes: Sequence[Unlike]) -> Table:
    """Return the settings and requests in which two runs differ."""
    rows = [[unlike.name, unlike.first, unlike.second] for unlike in unlikes]
    return Table("Not alike", ["", *names], rows)


def _row(difference: Difference) -> list[str]:
    low, high = difference.low, difference.high
    return [
        difference.name,
        _value(difference.first, difference.unit),
        _value(difference.second, difference.unit),
        _percent(difference.relative),
        NOTHING if low is None or high is None else f"{_percent(low)} to {_percent(high)}",
        _verdict(difference),
    ]


def _verdict(difference: Difference) -> str:
    if difference.low is None or difference.relative == 0.0:
        return ""
    if not difference.is_sure:
        return "noise"
    return "better" if difference.is_better else "worse"


def _value(value: float | None, unit: Unit) -> str:
    if value is None:
        return NOTHING
    match unit:
        case "share":
            return f"{value:.1%}"
        case "seconds":
            return duration(value)
        case "per second":
            return f"{value:.3g}" if value < 100.0 else f"{value:.0f}"


def _percent(relative: float | None) -> str:
    return NOTHING if relative is None else f"{100 * relative:+.1f} %"
