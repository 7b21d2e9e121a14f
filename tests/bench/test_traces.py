"""Workload files, well-formed and not."""

from pathlib import Path

import pytest
from hypothesis import given

from legato.bench.workload.requests import Workload, WorkloadRequest
from legato.bench.workload.traces import read_workload, write_workload
from legato.core.errors import ConfigError
from tests.bench.test_workload import workloads

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.0099300,2162,5
2024-05-10 00:00:01.5099309,10,44
2024-05-10 00:00:00.2599300,2399,6
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}

{"timestamp": 30500, "input_length": 6472, "output_length": 26, "hash_ids": [46]}
"""
LEGATO = """{"arrival_s": 0.0, "num_prompt_tokens": 5, "num_output_tokens": 7}
{"arrival_s": 1, "num_prompt_tokens": 6, "num_output_tokens": 8, "slo_class": "a", "priority": 1}
"""


def read(folder: Path, text: str) -> Workload:
    path = folder / "workload"
    path.write_text(text)
    return read_workload(path)


def test_azure_is_sorted_and_begins_at_0(tmp_path: Path) -> None:
    assert read(tmp_path, AZURE) == [
        WorkloadRequest(0.0, 2162, 5),
        WorkloadRequest(0.25, 2399, 6),
        WorkloadRequest(1.5, 10, 44),
    ]


def test_azure_with_time_zone_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    text = AZURE.replace(",2", "+00:00,2").replace("\n", "\r\n")
    assert read(tmp_path, "\ufeff" + text) == read(tmp_path, AZURE)


def test_mooncake(tmp_path: Path) -> None:
    assert read(tmp_path, MOONCAKE) == [
        WorkloadRequest(0.0, 6955, 52),
        WorkloadRequest(3.5, 6472, 26),
    ]


def test_legato(tmp_path: Path) -> None:
    assert read(tmp_path, LEGATO) == [
        WorkloadRequest(0.0, 5, 7),
        WorkloadRequest(1.0, 6, 8, "a", 1),
    ]


@given(workload=workloads)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, workload: Workload) -> None:
    path = tmp_path_factory.mktemp("workload") / "workload.jsonl"
    write_workload(path, workload)
    read = read_workload(path)
    start_s = workload[0].arrival_s
    assert [r.arrival_s for r in read] == pytest.approx([r.arrival_s - start_s for r in workload])
    write_workload(path, read)
    assert read_workload(path) == read


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "neither"),
        ("arrival,prompt,output\n1,2,3\n", 1, "neither"),
        (AZURE + "2024-05-10 00:00:02,1\n", 5, "not TIMESTAMP,"),
        (AZURE + "2024-05-10 00:00:02,1,x\n", 5, "'x'"),
        (AZURE + "yesterday,1,2\n", 5, "yesterday"),
        (AZURE + "2024-05-10 00:00:02,1,0\n", 5, "num_output_tokens"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 2}\n', 4, "output_length"),
        (MOONCAKE + '{"timestamp": 1, "input_length"\n', 4, "truncated"),
        (LEGATO + '{"arrival_s": 1, "num_prompt_tokens": 2.5}\n', 3, "num_prompt_tokens"),
        (LEGATO + LEGATO.replace("prio", "pirio"), 4, "piriority"),
    ],
)
def test_the_malformed_line_is_named(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'workload'}:{line}: ")
    assert message in str(error.value)


def test_no_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        read(tmp_path, AZURE.splitlines()[0])


def test_not_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot read"):
            read_workload(path)
