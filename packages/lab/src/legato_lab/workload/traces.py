"""Workload files. A file's beginning determines its format:

- a table (CSV) with the columns of Azure's LLM inference traces, of BurstGPT or of Vidur's and
  Sarathi's, or any others that are named;
- Mooncake's traces and Legato's own format: a JSON object a line;
- ShareGPT's conversations: a JSON array;
- recorded traffic, written by `legato serve --trace`.

A file whose name ends with ".gz" is compressed.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from legato.core.config import DEFAULT_MODEL
from legato.core.errors import ConfigError
from legato.observe.traces.trace_file import open_binary
from legato_lab.simulation.workload import Workload
from legato_lab.workload.formats.csv_table import Columns, csv_rows, header_of, known_columns
from legato_lab.workload.formats.json_lines import json_lines_rows
from legato_lab.workload.formats.recorded import RECORDED, read_recorded
from legato_lab.workload.formats.rows import Rows, WorkloadFile, read_rows
from legato_lab.workload.formats.share_gpt import CountTokens, share_gpt_rows

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a file.

    Attributes:
        columns: of a table; None means those of a known format.
        skip_bad_rows: instead of refusing the file.
        tokenizer: the model whose tokenizer measures a file's texts; None means the default model.
    """

    columns: Columns | None = None
    skip_bad_rows: bool = False
    tokenizer: str | None = None


def read_file(path: Path, reading: Reading, most: int | None = None) -> WorkloadFile:
    """Read the requests of a file by arrival, the first at 0.

    Args:
        most: enough requests; None reads all.

    Raises:
        ConfigError: the file cannot be read, holds no request, or a row of it is malformed.
        UnsupportedModelError: Legato does not support the tokenizer.
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
    """Read a file, as `read_file`, without further settings."""
    return read_file(path, Reading()).requests


def _text(path: Path) -> str | None:
    """Return a file's text; None for recorded traffic, which may be far larger."""
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
    # A slow import, needed only for this format.
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
        # To the microsecond: an absolute time in a float has no more digits.
        msgspec.structs.replace(request, arrival_s=round(request.arrival_s - start_s, 6))
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.arrival_s)
