"""Workload files. The first line says which format it is:

- Azure's LLM inference traces: CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake's traces: JSONL with `timestamp` in milliseconds, `input_length`, `output_length`. Which
  prompts share a prefix (`hash_ids`) is not read.
- Legato's own: JSONL with the fields of `WorkloadRequest`.
- Recorded traffic: what `legato serve --trace` wrote, as lines of JSON.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from legato.bench.workload.requests import Workload, WorkloadRequest
from legato.core.errors import ConfigError
from legato.core.slo import INTERACTIVE
from legato.core.step_record import RequestArrived, RequestEnded
from legato.core.tenant import DEFAULT_TENANT
from legato.observe.traces.trace_file import open_binary, read_trace

_RECORDED = b'{"kind":"trace"'
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int


def read_workload(path: Path) -> Workload:
    """The requests of a file by arrival, the first of which is at 0.

    Raises:
        ConfigError: the file cannot be read, holds no request, or a line of it is malformed.
    """
    if _is_recorded(path):
        return _from_zero(_recorded_requests(path))
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    parse = _parser(path, lines[0] if lines else "")
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line == _AZURE_HEADER:
            continue
        try:
            requests.append(parse(line))
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return _from_zero(requests)


def write_workload(path: Path, workload: Workload) -> None:
    """Write Legato's own format."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(workload))


def _parser(path: Path, first_line: str) -> Callable[[str], WorkloadRequest]:
    if first_line == _AZURE_HEADER:
        return _parse_azure
    if '"input_length"' in first_line:
        return _parse_mooncake
    if '"num_prompt_tokens"' in first_line:
        return _parse_legato
    raise ConfigError(f"{path}:1: neither an Azure trace (CSV) nor Mooncake's or Legato's (JSONL)")


def _parse_azure(line: str) -> WorkloadRequest:
    values = line.split(",")
    if len(values) != len(_AZURE_HEADER.split(",")):
        raise ValueError(f"not {_AZURE_HEADER}: {line!r}")
    arrival = datetime.fromisoformat(values[0])
    if arrival.tzinfo is None:
        # Local time could have a daylight saving jump in it.
        arrival = arrival.replace(tzinfo=UTC)
    return WorkloadRequest(arrival.timestamp(), int(values[1]), int(values[2]))


def _parse_mooncake(line: str) -> WorkloadRequest:
    row = msgspec.json.decode(line, type=_MooncakeRow)
    return WorkloadRequest(row.timestamp / 1000, row.input_length, row.output_length)


def _parse_legato(line: str) -> WorkloadRequest:
    return msgspec.json.decode(line, type=WorkloadRequest)


def _is_recorded(path: Path) -> bool:
    try:
        with open_binary(path, "rb") as file:
            return file.read(len(_RECORDED)) == _RECORDED
    except OSError:
        return False  # which reading it as text will tell of


def _recorded_requests(path: Path) -> list[WorkloadRequest]:
    """Those that had ended; what they would have become if they had not been refused is a guess."""
    _, lines = read_trace(path)
    arrived: dict[str, RequestArrived] = {}  # key request id
    requests = []
    for line in lines:
        if isinstance(line, RequestArrived) and not line.is_rerun:
            arrived[line.request_id] = line
        elif isinstance(line, RequestEnded) and line.request_id in arrived:
            requests.append(_recorded_request(arrived.pop(line.request_id), line))
    if not requests:
        raise ConfigError(f"{path} has no requests that ended")
    return requests


def _recorded_request(arrival: RequestArrived, end: RequestEnded) -> WorkloadRequest:
    return WorkloadRequest(
        arrival.arrived_s,
        arrival.num_prompt_tokens,
        end.num_output_tokens or arrival.max_tokens or 1,
        None if arrival.slo_class == INTERACTIVE else arrival.slo_class,
        arrival.priority,
        None if arrival.tenant == DEFAULT_TENANT else arrival.tenant,
    )


def _from_zero(requests: list[WorkloadRequest]) -> Workload:
    start_s = min(request.arrival_s for request in requests)
    moved = [
        # To the microsecond, which is what is left of an absolute time in a float.
        msgspec.structs.replace(request, arrival_s=round(request.arrival_s - start_s, 6))
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.arrival_s)
