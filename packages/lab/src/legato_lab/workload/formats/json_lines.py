"""Formats with a JSON object a line: Mooncake's and Legato's own."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from legato_lab.simulation.workload import WorkloadRequest
from legato_lab.workload.formats.rows import Rows


class _MooncakeRow(msgspec.Struct, frozen=True):
    """Attributes: timestamp: in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_decode_mooncake = msgspec.json.Decoder(_MooncakeRow).decode
_decode_legato = msgspec.json.Decoder(WorkloadRequest).decode


def json_lines_rows(text: str) -> Rows | None:
    """Return the rows of a file; None if the first has neither format's fields."""
    first = text.partition("\n")[0]
    if '"input_length"' in first:
        return Rows(_lines(text), _read(_mooncake_request))
    if '"num_prompt_tokens"' in first:
        return Rows(_lines(text), _read(_decode_legato))
    return None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line and not line.isspace():
            yield number, line


def _read(
    decode: Callable[[str], WorkloadRequest],
) -> Callable[[str], Sequence[WorkloadRequest]]:
    return lambda line: (decode(line),)


def _mooncake_request(line: str) -> WorkloadRequest:
    row = _decode_mooncake(line)
    return WorkloadRequest(
        row.timestamp / 1000, row.input_length, row.output_length, hash_ids=row.hash_ids
    )
