"""Workload files. How a file begins says which format it is:

- a table (CSV) with the columns of Azure's LLM inference traces, of BurstGPT or of Vidur's and
  Sarathi's, or any others, where they are named;
- Mooncake's traces and Legato's own format: a JSON object a line;
- ShareGPT's conversations: a JSON array;
- recorded traffic, which `legato serve --trace` wrote.

A file whose name ends with ".gz" is compressed.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from legato.core.config import DEFAULT_MODEL
from legato.core.errors import ConfigError
from legato.lab.workload.formats.csv_table import Columns, csv_rows, header_of, known_columns
from legato.lab.workload.formats.json_lines import json_lines_rows
from legato.lab.workload.formats.recorded import RECORDED, read_recorded
from legato.lab.workload.formats.rows import Rows, WorkloadFile, read_rows
from legato.lab.workload.formats.share_gpt import CountTokens, share_gpt_rows
from legato.observe.traces.trace_file import open_binary
from legato.simulation.workload import Workload

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How a file is to be read.

    Attributes:
        columns: of a table; None takes those of a format that is known.
        skip_bad_rows: instead of refusing the file.
        tokenizer: of which model, where a file has texts; None takes the default model's.
    """

    columns: Columns | None = None
    skip_bad_rows: bool = False
    tokenizer: str | None = None


def read_file(path: Path, reading: Reading, most: int | None = None) -> WorkloadFile:
    """The requests of a file by arrival, the first of which is at 0.

    Args:
        most: how many of them are asked for at least; None asks for all.

    Raises:
        ConfigError: the file cannot be read, holds no request, or a row of it is malformed.
        UnsupportedModelError: the tokenizer is of a kind that Legato does not know.
    """
    text = _text(path)
    if text is None:
        return WorkloadFile(requests=_from_zero(read_recorded(path)))
    rows = _rows(path, text, reading)
    file = read_rows(path, rows, skip_bad_rows=reading.skip_bad_rows, most=most)
    if not file.requests:
        skipped = f" but malformed rows, such as {file.first_bad_row}" if file.num_bad_rows else ""
        raise ConfigError(f"{path} has no requests{skipped}")
    return msgspec.structs.replace(file, requests=_from_zero(file.requests))


def read_workload(path: Path) -> Workload:
    """As `read_file`, of a file that says itself how it is to be read."""
    return read_file(path, Reading()).requests


def write_workload(path: Path, workload: Workload) -> None:
    """Write Legato's own format."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(workload))


def _text(path: Path) -> str | None:
    """What is in a file; None where that is recorded traffic, which may be far more."""
    try:
        with open_binary(path, "rb") as file:
            start = file.read(len(RECORDED))
            if start == RECORDED:
                return None
            return (start + file.read()).removeprefix(_BYTE_ORDER_MARK).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _rows(path: Path, text: str, reading: Reading) -> Rows:
    try:
        if reading.columns:
            return csv_rows(text, reading.columns)
        if text.lstrip().startswith("["):
            return share_gpt_rows(text, _counter(reading.tokenizer or DEFAULT_MODEL))
        if rows := json_lines_rows(text):
            return rows
        if columns := known_columns(header_of(text)):
            return csv_rows(text, columns)
    except ConfigError as error:
        raise ConfigError(f"{path}:1: {error}") from error
    raise ConfigError(
        f"{path}:1: neither a table of Azure, BurstGPT or Vidur (CSV; others with --columns) nor "
        "Mooncake's or Legato's lines (JSONL), conversations (JSON) or a recorded trace"
    )


def _counter(model: str) -> CountTokens:
    # Slow to import, and only this one format needs it.
    from legato.checkpoint.source import resolve_source
    from legato.text.tokenizer import load_tokenizer

    backend = load_tokenizer(resolve_source(model)).backend

    def count_tokens(texts: Sequence[str]) -> list[int]:
        encoded = backend.encode_batch(list(texts), add_special_tokens=False)
        return [len(encoding.ids) for encoding in encoded]

    return count_tokens


def _from_zero(requests: Workload) -> Workload:
    start_s = min(request.arrival_s for request in requests)
    moved = [
        # To the microsecond, which is what is left of an absolute time in a float.
        msgspec.structs.replace(request, arrival_s=round(request.arrival_s - start_s, 6))
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.arrival_s)
