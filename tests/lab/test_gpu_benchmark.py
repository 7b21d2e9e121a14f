"""`benchmarks.gpu` as far as it goes without a GPU: its parts on a CPU, with tiny sizes."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from benchmarks.__main__ import main as run_benchmark
from benchmarks.gpu import __main__, runner
from benchmarks.gpu.figures import UNENDED, Figures, PartFailedError, Report, Row, section
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import correctness, servers
from benchmarks.gpu.parts.ceilings import known_roofline
from benchmarks.gpu.settings import (
    LLAMA_3_1_8B,
    QUICK_SIZES,
    Settings,
    Sizes,
    shape_folder,
)

from legato.checkpoint.loader import open_checkpoint
from legato.core.config import ModelConfig
from legato_lab.work import MeasuredRates
from tests.api.launch import wait_until

TINY = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "dtype": "float32",
}
SIZES = Sizes(
    streams=(1, 3),
    quantized=(1, 3),
    vllm_chunks=(16,),
    probe_longs=1,
    context=40,
    decoded=6,
    prompt=96,
    chunks=(96, 32),
    mixed=(16,),
    mixed_streams=2,
    mixed_start=32,
    max_model_len=4096,
    probe_streams=2,
    probe_s=0.2,
    probe_tokens=4000,
    batch=(3, 20, 4),
    matrix=64,
    vector_bytes=2**16,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B | TINY))
    return Settings(
        model=str(tmp_path), out=str(tmp_path / "out"), device="cpu", itl_slo_s=None, sizes=SIZES
    )


def of_part(settings: Settings, part: str) -> Figures:
    """Here, in this process."""
    return runner.run_part(settings, part)


def names(figures: Figures) -> list[str]:
    assert not figures.failure, figures.failure
    assert all(row.value > 0 for row in figures.rows)
    return [row.name for row in figures.rows]


def test_the_shape_is_llamas(tmp_path: Path) -> None:
    folder = shape_folder(tmp_path)
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), load_format="dummy"))
    numbers = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    assert numbers == 8_030_261_248
    assert checkpoint.dtype is torch.bfloat16


def test_ceilings(settings: Settings) -> None:
    figures = of_part(settings, "ceilings")
    assert len(names(figures)) == 5
    assert len(figures.notes) == 2


def test_a_roofline_is_measured_once(settings: Settings) -> None:
    file = settings.figures_file("ceilings")
    file.parent.mkdir()
    rows = [
        Row(name="copy on the device", value=3.5, unit="TB/s"),
        Row(name="matrix product, bfloat16", value=830.0, unit="TFLOP/s"),
        Row(name="copy on the device, hot", value=3.0, unit="TB/s"),
        Row(name="matrix product, bfloat16, hot", value=798.0, unit="TFLOP/s"),
    ]
    file.write_bytes(msgspec.json.encode(Figures(title="", rows=rows)))
    assert known_roofline(settings) == MeasuredRates(bytes_a_s=3.0e12, flops_a_s=798e12)
    file.unlink()
    assert known_roofline(settings).bytes_a_s < 3.0e12


def test_steps(settings: Settings) -> None:
    figures = of_part(settings, "steps")
    assert "Kernels of 2 streams and 16 tokens at 32" in figures.notes[-1]
    assert "| `aten::" in figures.notes[-1]
    assert names(figures)[1:] == [
        "ITL of 1 stream at 40",
        "ITL of 3 streams at 40",
        "ITL of 2 streams at 40, 1 step in flight",
        "ITL of 2 streams at 40, sampled with top-k and top-p",
        "prompt of 96 in chunks of 96",
        "prompt of 96 in chunks of 32",
        "2 streams and 16 tokens at 32",
    ]


def test_quantized_decodes(settings: Settings) -> None:
    assert names(of_part(settings, "int4")) == ["ITL of 1 stream at 40", "ITL of 3 streams at 40"]


def test_streams_end_to_end(settings: Settings) -> None:
    figures = of_part(settings, "streams")
    assert len(names(figures)) == 8


def test_a_batch_has_no_promise(settings: Settings) -> None:
    promised = msgspec.structs.replace(settings, itl_slo_s=0.5)
    [name] = names(of_part(promised, "batch"))
    assert name == "output of 3 x 20 in, 4 out, at once, no promise"


@pytest.mark.parametrize(("part", "count"), [("static", 2), ("transformers", 1)])
def test_peers_that_need_no_network(part: str, count: int, settings: Settings) -> None:
    assert len(names(of_part(settings, part))) == count


FAKE_VLLM = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "model", "max_model_len": 4096}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["ignore_eos"], asked
        self.send_response(200)
        self.end_headers()
        count = asked["max_tokens"]
        for number in range(count):
            time.sleep(0.005)
            self.event({"choices": [{"text": "x"}], "usage": {"completion_tokens": number + 1}})
        self.event({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def event(self, told):
        self.wfile.write(b"data: " + json.dumps(told).encode() + b"\\n\\n")

    def answer(self, told):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_):
        pass

flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert sys.argv[1] == "serve" and flags["--load-format"] == "dummy", sys.argv
assert flags["--max-num-batched-tokens"] == "16", flags
ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def test_vllm_is_asked_over_http(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are those of any server; Legato's own are left out here."""
    program = tmp_path / "fake_vllm.py"
    program.write_text(FAKE_VLLM)
    settings = msgspec.structs.replace(settings, vllm=(sys.executable, str(program)))
    whole = servers._commands
    monkeypatch.setattr(servers, "_commands", lambda settings: list(whole(settings))[:1])
    assert names(of_part(settings, "servers")) == [
        f"vLLM, chunks of 16: {figure}"
        for figure in (
            "start",
            "median gap",
            "median beside long prompts",
            "P99 beside them",
            "long prompts' TTFT",
            "streams' output beside them",
            "output of 3 x 20 in, 4 out",
        )
    ]


def test_tests_that_fail_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_left_out(): pytest.skip('no')\n"
    )
    kept: list[Figures] = []
    report = Report("", kept.append)
    with pytest.raises(PartFailedError, match="1 tests"):
        correctness.of_tests([file], report)
    figures = report.figures()
    assert kept[0].failure == UNENDED, "what has been found so far is kept"
    assert [(row.name, row.value) for row in figures.rows] == [
        ("passed", 1),
        ("failed", 1),
        ("skipped", 1),
    ]
    assert "test_wrong" in figures.notes[0]
    assert "1 == 2" in figures.notes[0]
    with pytest.raises(PartFailedError, match="test_none"):
        correctness.of_tests([tmp_path / "test_none.py"], report)


def measured(settings: Settings, part: str, *, again: bool = False) -> Figures:
    until_s = time.monotonic() + 60
    ((_, figures),) = runner.measured(settings, [part], again=again, until_s=until_s)
    return figures


def test_a_second_call_goes_on_where_the_first_one_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(settings, "ceilings")
    assert len(names(first)) == 5
    assert measured(settings, "ceilings") == first
    monkeypatch.setitem(runner.PARTS, "ceilings", 0.01)
    assert "took more than" in measured(settings, "ceilings", again=True).failure
    assert "took more than" in measured(settings, "ceilings").failure, "what failed is tried again"
    assert not list(runner.measured(settings, ["ceilings"], again=True, until_s=time.monotonic()))


def test_a_part_that_breaks_says_where(settings: Settings) -> None:
    broken = msgspec.structs.replace(settings, model="/nowhere")
    failure = measured(broken, "steps").failure
    assert "there is no model at '/nowhere'" in failure
    assert "in _resolve" in failure


HANGING = """
import subprocess, sys, time
import msgspec
from benchmarks.gpu.figures import Report, Row

def keep(figures):
    open(FILE, "wb").write(msgspec.json.encode(figures))

report = Report("A part that hangs", keep)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
report.add(Row(name="child", value=child.pid, unit=""))
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    """Tell whether a process runs no more, be it reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_part_that_hangs_leaves_its_rows_and_no_process(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hanging.py"
    program.write_text(f"FILE = {str(settings.figures_file('steps'))!r}\n{HANGING}")
    settings.figures_file("steps").parent.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(runner, "_PROGRAM", [sys.executable, str(program)])
    monkeypatch.setitem(runner.PARTS, "steps", 5.0)
    figures = measured(settings, "steps")
    assert figures.failure == "it took more than 5 s"
    [row] = figures.rows
    wait_until(lambda: has_ended(int(row.value)), "the part's child still runs")


UNINSTALLED = """
import importlib.util, os, sys
importlib.util.find_spec = lambda name: None
import benchmarks
print(*sys.path[:3], os.environ["PYTHONPATH"])
"""


def test_a_clone_that_is_not_installed_is_measured() -> None:
    """The processes that it starts find Legato, too."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", UNINSTALLED]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    told = subprocess.check_output(command, cwd=root, env=environment, text=True).split()
    sources = [str(root / name) for name in ("src", "packages/fleet/src", "packages/lab/src")]
    assert told == [*sources, os.pathsep.join(sources)]


def test_a_page(settings: Settings) -> None:
    rows = [
        Row(name="ITL", value=6.0, unit="ms", least=5.0, target=1.2),
        Row(name="prompt", value=20_000.0, unit="tokens/s", least=40_000.0),
    ]
    found = {"steps": Figures(title="Steps", rows=rows, notes=["Of a test."], seconds=3.0)}
    text = page(settings, found)
    assert "| ITL | 6 ms | 5 ms | 1.20 | 1.20 |" in text
    assert "| prompt | 20,000 tokens/s | 40,000 tokens/s | 2 |  |" in text
    assert (
        "Not measured yet: ceilings, batch, streams, correctness, attention, experts, products, "
        "sampling, static, transformers, servers, fp8, fp8_exact, int4."
    ) in text
    assert "**Failed**: broken" in section(Figures(title="Peers", failure="broken"))


@pytest.mark.parametrize(("failure", "status"), [("", 0), ("broken", 1)])
def test_each_part_is_printed_and_on_the_page(
    failure: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def found(settings: Settings, parts: list[str], **_: object) -> Iterator[tuple[str, Figures]]:
        assert json.loads((Path(settings.model) / "config.json").read_text()) == LLAMA_3_1_8B
        for part in parts:
            yield part, Figures(title=f"Part {part}", failure=failure)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(__main__, "measured", found)
    assert run_benchmark(["gpu", "--out", str(tmp_path / "gpu")]) == status
    printed, written = capsys.readouterr().out, (tmp_path / "gpu" / "page.md").read_text()
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert {"gpu/page.md", "gpu/gpu.json"} <= set(archive.getnames())
    for part in runner.PARTS:
        assert f"## Part {part}" in printed
        assert f"## Part {part}" in written


def test_the_quick_part_has_sizes_and_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(
        settings: Settings, parts: list[str], *, until_s: float, **_: object
    ) -> Iterator[tuple[str, Figures]]:
        assert (settings.sizes, settings.out) == (QUICK_SIZES, str(tmp_path / "gpu" / "quick"))
        assert settings.vllm == ("python", "-m", "vllm")
        assert until_s < time.monotonic() + 180
        yield from ((part, Figures(title=part)) for part in parts)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(__main__, "measured", found)
    flags = ["--part", "quick", "--vllm", "python -m vllm", "--out", str(tmp_path / "gpu")]
    assert run_benchmark(["gpu", *flags]) == 0
    found_figures = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert all(f'"{part}"' in json.dumps(found_figures) for part in runner.GROUPS["quick"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "torch sees none here" in ended.stderr
    assert not (tmp_path / "out").exists()
