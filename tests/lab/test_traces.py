"""Workload files, well-formed and not."""

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import Workload, WorkloadRequest
from legato_lab.workload.formats.csv_table import Columns
from legato_lab.workload.formats.rows import WorkloadFile
from legato_lab.workload.traces import Reading, read_file, read_workload
from tests.lab.test_workload import workloads
from tests.lab.workload_file import write_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.0099300,2162,5
2024-05-10 00:00:01.5099309,10,44
2024-05-10 00:00:00.2599300,2399,6
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}

{"timestamp": 30500, "input_length": 6472, "output_length": 26}
"""
LEGATO = """{"arrival_s": 0.0, "num_prompt_tokens": 5, "num_output_tokens": 7}
{"arrival_s": 1, "num_prompt_tokens": 6, "num_output_tokens": 8, "slo_class": "a", "priority": 1}
"""


BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
1106,ChatGPT,0,0,0,Conversation log
118,GPT-4,417,276,693,API log
"""
VIDUR = """,num_prefill_tokens,num_decode_tokens,pd_ratio
0,374,44,8.5
1,396,109.0,3.6
"""
SHARE_GPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "what is a stall"},
            {"from": "gpt", "value": "a wait"},
            {"from": "human", "value": "why"},
            {"from": "gpt", "value": "long prompts"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
    {
        "id": "c",
        "conversations": [
            {"from": "user", "value": "hello you"},
            {"from": "assistant", "value": "hello"},
            {"from": "assistant", "value": "again"},
        ],
    },
]


def read(folder: Path, text: str) -> Workload:
    path = folder / "workload"
    path.write_text(text)
    return read_workload(path)


def read_as(folder: Path, text: str, reading: Reading) -> WorkloadFile:
    path = folder / "workload"
    path.write_text(text)
    return read_file(path, reading)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer to which each word is a token."""
    folder = tmp_path_factory.mktemp("words")
    backend = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


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
        WorkloadRequest(0.0, 600, 52, hash_ids=(46, 47)),
        WorkloadRequest(3.5, 6472, 26),
    ]


def test_legato(tmp_path: Path) -> None:
    assert read(tmp_path, LEGATO) == [
        WorkloadRequest(0.0, 5, 7),
        WorkloadRequest(1.0, 6, 8, "a", 1),
    ]


def test_burst_gpt_leaves_failures_out_and_counts_them(tmp_path: Path) -> None:
    file = read_as(tmp_path, BURST_GPT, Reading())
    assert file.requests == [
        WorkloadRequest(0.0, 472, 18),
        WorkloadRequest(40.0, 1087, 230),
        WorkloadRequest(113.0, 417, 276),
    ]
    assert (file.num_unanswered, file.num_bad_rows) == (1, 0)


def test_vidur_has_times_or_none(tmp_path: Path) -> None:
    lengths = [WorkloadRequest(0.0, 374, 44), WorkloadRequest(0.0, 396, 109)]
    assert read(tmp_path, VIDUR) == lengths
    timed = "num_prefill_tokens,num_decode_tokens,arrived_at\n7,8,1.5\n5,6,0.5\n"
    assert read(tmp_path, timed) == [WorkloadRequest(0.0, 5, 6), WorkloadRequest(1.0, 7, 8)]


def test_share_gpt_asks_with_the_conversation_so_far(tmp_path: Path, words: str) -> None:
    file = read_as(tmp_path, json.dumps(SHARE_GPT), Reading(tokenizer=words))
    assert file.requests == [
        WorkloadRequest(0.0, 6, 2),
        WorkloadRequest(0.0, 9, 2),
        WorkloadRequest(0.0, 2, 1),
    ]
    assert file.num_unanswered == 1


def test_conversations_are_measured_no_further_than_asked(tmp_path: Path, words: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([SHARE_GPT[0], {"id": "malformed"}]))
    assert len(read_file(path, Reading(tokenizer=words), most=2).requests) == 2
    with pytest.raises(ConfigError, match="conversation 2"):
        read_file(path, Reading(tokenizer=words), most=3)


def test_a_malformed_conversation_is_named_or_skipped(tmp_path: Path, words: str) -> None:
    text = json.dumps([*SHARE_GPT, {"id": "d", "conversations": "none"}])
    with pytest.raises(ConfigError, match="workload: conversation 4: Expected `array`"):
        read_as(tmp_path, text, Reading(tokenizer=words))
    file = read_as(tmp_path, text, Reading(tokenizer=words, skip_bad_rows=True))
    assert (len(file.requests), file.num_bad_rows) == (3, 1)


def test_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert read_workload(path) == read(tmp_path, AZURE)


TABLE = """when,in,out,who,kind
2024-05-12 00:00:00+00:00,10,1,"Smith, J.",batch
2024-05-12T02:00:00.5+02:00,20,2,,
"""
NAMED = "arrival=when,prompt=in,output=out,class=kind,tenant=who"


def test_any_table_by_the_names_of_its_columns(tmp_path: Path) -> None:
    assert read_as(tmp_path, TABLE, Reading(columns=Columns.parse(NAMED))).requests == [
        WorkloadRequest(0.0, 10, 1, "batch", 0, "Smith, J."),
        WorkloadRequest(0.5, 20, 2),
    ]
    untimed = Reading(columns=Columns.parse("output=in, prompt=out"))
    assert [r.num_output_tokens for r in read_as(tmp_path, TABLE, untimed).requests] == [10, 20]
    with pytest.raises(ConfigError, match="workload:1: no column input; columns are: when, in,"):
        read_as(tmp_path, TABLE, Reading(columns=Columns.parse("prompt=input,output=out")))


@pytest.mark.parametrize(
    "text", ["", "prompt=in", "prompt=in,output=", "prompt=in,output=out,age=x", "in,out"]
)
def test_columns_in_another_form(text: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form 'prompt=NAME,output=NAME"):
        Columns.parse(text)


_names = st.text(st.characters(exclude_characters="=,\r\n\0", exclude_categories=["C", "Z"]))
_rows = st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999), _names), min_size=1)


@example(names=["[", "0", "{}"], rows=[(1, 1, "")])
@given(names=st.lists(_names.filter(bool), min_size=3, max_size=3, unique=True), rows=_rows)
def test_tables_however_they_are_quoted(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], rows: list[tuple[int, int, str]]
) -> None:
    written = io.StringIO()
    csv.writer(written).writerows([names, *rows])
    columns = Columns(prompt=names[0], output=names[1], tenant=names[2])
    folder = tmp_path_factory.mktemp("table")
    (folder / "workload").write_text(written.getvalue(), encoding="utf-8", newline="")
    assert read_file(folder / "workload", Reading(columns=columns)).requests == [
        WorkloadRequest(0.0, prompt, output, tenant=tenant or None)
        for prompt, output, tenant in rows
    ]


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    text = AZURE + "2024-05-10 00:00:02,1\nnever,1,2\n" + "2024-05-10 00:00:02,1,2\n"
    file = read_as(tmp_path, text, Reading(skip_bad_rows=True))
    assert (len(file.requests), file.num_bad_rows) == (4, 2)
    assert file.first_bad_row == f"{tmp_path / 'workload'}:5: 2 values, but 3 columns"
    with pytest.raises(ConfigError, match=r"no requests but malformed rows, such as .*:2: 'nan'"):
        read_as(
            tmp_path, BURST_GPT.splitlines()[0] + "\nnan,a,1,1,2,b\n", Reading(skip_bad_rows=True)
        )


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
        (AZURE + "2024-05-10 00:00:02,1\n", 5, "2 values, but 3 columns"),
        (AZURE + "2024-05-10 00:00:02,1,x\n", 5, "'x'"),
        (AZURE + "yesterday,1,2\n", 5, "yesterday"),
        (AZURE + "2024-05-10 00:00:02,1,0\n", 5, "num_output_tokens"),
        (AZURE + "2024-05-10 00:00:02,1.5,1\n", 5, "'1.5' is not a whole number"),
        (BURST_GPT + "inf,a,1,1,2,b\n", 6, "'inf' is not a time"),
        (BURST_GPT + "9,a,0,1,1,b\n", 6, "num_prompt_tokens"),
        (MOONCAKE + MOONCAKE.replace("600", "500"), 4, "2 hash_ids, but 500 tokens are 1 block"),
        (MOONCAKE + MOONCAKE.replace("46", "-46"), 4, "hash_ids must be at least 0, got -46"),
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
