"""A trace comes back as it was written, however its writer ended."""

import gzip
import math
from pathlib import Path

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.observe.traces.trace_file import (
    VERSION,
    JsonlTrace,
    RecordsDropped,
    ReplayBasis,
    TraceHeader,
    TraceLine,
    read_trace,
)
from tests.observe.recorded import recorded_run

HEADER = TraceHeader(started_s=1.0, unix_s=None, settings={"model": "m"})
LINES: list[TraceLine] = [*recorded_run(), RecordsDropped(num_records=3)]


V1_STEP = (
    b'{"kind":"step","step_id":0,"planned_s":0,"started_s":0,"ended_s":0.1,"predicted_s":null,'
    b'"limit_s":null,"budget_tokens":32,"chunks":[{"request_id":"0","start":0,"num_tokens":9,'
    b'"num_samples":1,"ended_by":"decode"}],"admitted":{},"preempted":[],"held_by":null,'
    b'"failed":[],"ran_out_of_memory":false,"num_running":1,"num_waiting":0,"num_blocks":1,'
    b'"num_used_blocks":1,"num_cached_blocks":0}\n'
)


def header(version: int) -> bytes:
    """A trace's first line."""
    return b'{"kind":"trace","version":%d,"started_s":0,"unix_s":0,"settings":{}}\n' % version


@pytest.fixture(params=["t.jsonl", "t.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_all_records_come_back(path: Path) -> None:
    trace = JsonlTrace(path, HEADER)
    trace.write(LINES[:5])
    trace.write(LINES[5:])
    trace.close()
    header, lines = read_trace(path)
    assert header == HEADER
    assert list(lines) == LINES


def test_what_was_written_can_be_read_before_the_end(path: Path) -> None:
    trace = JsonlTrace(path, HEADER)
    trace.write(LINES)
    assert list(read_trace(path)[1]) == LINES
    trace.close()


def test_a_line_without_its_end_is_left_out(path: Path) -> None:
    trace = JsonlTrace(path, HEADER)
    trace.write(LINES)
    trace.close()
    whole = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    cut = whole[:-7]
    path.write_bytes(gzip.compress(cut)[:-4] if path.suffix == ".gz" else cut)
    assert list(read_trace(path)[1]) == LINES[:-1]


@pytest.mark.parametrize("slack", [0.05, math.inf])
def test_settings_come_back_but_for_what_only_drafts_need(tmp_path: Path, slack: float) -> None:
    scheduler = SchedulerConfig(speculative_slack=slack, itl_slo_s=0.1)
    basis = ReplayBasis(scheduler=scheduler, max_model_len=64, num_blocks=4, block_size=16)
    JsonlTrace(tmp_path / "t.jsonl", msgspec.structs.replace(HEADER, basis=basis)).close()
    read, _ = read_trace(tmp_path / "t.jsonl")
    assert read.basis is not None
    assert msgspec.structs.replace(read.basis.scheduler, speculative_slack=slack) == scheduler


@pytest.mark.parametrize("scheduler", [b'{"later": 1}', b'{"itl_slo_s": 1e9}', b'{"policy": "a"}'])
def test_settings_of_another_version_leave_the_records(tmp_path: Path, scheduler: bytes) -> None:
    basis = b'"basis":{"scheduler":%b,"max_model_len":9,"num_blocks":9,"block_size":9}' % scheduler
    path = tmp_path / "t.jsonl"
    path.write_bytes(header(VERSION).replace(b"}}\n", b"},%b}\n" % basis))
    read, lines = read_trace(path)
    assert (read.basis, list(lines)) == (None, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace"),
        (b"[]\n", "line 1 is not"),
        (b'{"kind":"dropped","num_records":1}\n', "is not a trace"),
        (header(9), "trace of version 9; this reads 2 and 3"),
        (header(1) + V1_STEP, "trace of version 1; this reads 2 and 3"),
        (b"\xff\xfe\n", "line 1 is not"),
    ],
)
def test_what_is_no_trace_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "text.gz").write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "text.gz")
