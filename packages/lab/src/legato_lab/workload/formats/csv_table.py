"""Tables of comma-separated values, read by their columns' names."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import WorkloadRequest
from legato_lab.workload.formats.rows import Rows


class Columns(msgspec.Struct, frozen=True, kw_only=True, rename={"slo_class": "class"}):
    """The names of a table's columns.

    Attributes:
        arrival: seconds, or dates with times in ISO 8601; without a time zone they are UTC. None if
            requests have no time.
        prompt, output: tokens.
        skips_unanswered: whether a row without output is a failed request, not a malformed row.
    """

    prompt: str
    output: str
    arrival: str | None = None
    slo_class: str | None = None
    tenant: str | None = None
    skips_unanswered: bool = False

    @classmethod
    def parse(cls, text: str) -> "Columns":
        """Parse "prompt=NAME,output=NAME", with other columns if any.

        Raises:
            ConfigError: the text has another form.
        """
        pairs = [part.partition("=")[::2] for part in text.split(",")]
        named = {key.strip(): name.strip() for key, name in pairs}
        is_right = _REQUIRED <= named.keys() <= _NAMES and all(named.values())
        if not is_right or len(named) != len(pairs):
            raise ConfigError(f"{text!r} is not of the form {COLUMNS!r}")
        return msgspec.convert(named, cls)

    @property
    def names(self) -> list[str]:
        """The names of all required columns."""
        named = (self.arrival, self.prompt, self.output, self.slo_class, self.tenant)
        return [name for name in named if name is not None]


COLUMNS = "prompt=NAME,output=NAME[,arrival=NAME][,class=NAME][,tenant=NAME]"
"""The form of `Columns.parse`'s text."""

_REQUIRED = {"prompt", "output"}
_NAMES = {*_REQUIRED, "arrival", "class", "tenant"}

AZURE = Columns(arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens")
BURST_GPT = Columns(
    arrival="Timestamp", prompt="Request tokens", output="Response tokens", skips_unanswered=True
)
VIDUR = Columns(arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens")
VIDUR_LENGTHS = Columns(prompt="num_prefill_tokens", output="num_decode_tokens")

_KNOWN = (AZURE, BURST_GPT, VIDUR, VIDUR_LENGTHS)


def known_columns(header: Sequence[str]) -> Columns | None:
    """Return the columns of the first known format that fits the header, if any."""
    found = (columns for columns in _KNOWN if set(columns.names) <= set(header))
    return next(found, None)


def header_of(text: str) -> list[str]:
    """Return the names of a table's columns."""
    return [name.strip() for name in next(csv.reader([text.partition("\n")[0]]), [])]


def csv_rows(text: str, columns: Columns) -> Rows:
    """Return all rows except the header and empty ones.

    Raises:
        ConfigError: a column is missing.
    """
    header = header_of(text)
    missing = [name for name in columns.names if name not in header]
    if missing:
        raise ConfigError(f"no column {', '.join(missing)}; columns are: {', '.join(header)}")
    return Rows(_rows(text), _reader(columns, header))


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    next(reader)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield reader.line_num, []  # too few values, so malformed
            continue
        if row:
            yield reader.line_num, row


def _reader(
    columns: Columns, header: list[str]
) -> Callable[[list[str]], Sequence[WorkloadRequest]]:
    def place(name: str | None) -> int | None:
        return None if name is None else header.index(name)

    prompt, output = header.index(columns.prompt), header.index(columns.output)
    arrival, slo_class, tenant = map(place, (columns.arrival, columns.slo_class, columns.tenant))
    num_columns, skips_unanswered = len(header), columns.skips_unanswered

    def read(row: list[str]) -> Sequence[WorkloadRequest]:
        if len(row) != num_columns:
            raise ValueError(f"{len(row)} values, but {num_columns} columns")
        num_output = _tokens(row[output])
        if not num_output and skips_unanswered:
            return ()
        return (
            WorkloadRequest(
                0.0 if arrival is None else _arrival_s(row[arrival]),
                _tokens(row[prompt]),
                num_output,
                None if slo_class is None else row[slo_class] or None,
                0,
                None if tenant is None else row[tenant] or None,
            ),
        )

    return read


def _tokens(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = float(text)  # some writers make floats of whole numbers beside missing ones
    if not value.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _arrival_s(text: str) -> float:
    if ":" in text:
        arrival = datetime.fromisoformat(text.strip())
        if arrival.tzinfo is None:
            # Local time could contain a daylight saving jump.
            arrival = arrival.replace(tzinfo=UTC)
        return arrival.timestamp()
    arrival_s = float(text)
    if not math.isfinite(arrival_s):
        raise ValueError(f"{text!r} is not a time")
    return arrival_s
