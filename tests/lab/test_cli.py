"""`legato bench` from outside, on a real server."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from legato.cli.main import main
from legato.cli.values import duration_s
from legato.core.version import install_command
from legato_lab.commands import capacity_settings
from legato_lab.load.client import Address
from legato_lab.report.report_file import CapacityReport, ProbeReport, RunReport, read_report
from legato_lab.workload.mixes import MIXES
from tests.api.launch import MODEL
from tests.forks.start import run
from tests.lab.test_traces import AZURE


def bench(*args: str) -> "subprocess.CompletedProcess[str]":
    return run("legato", "bench", *args)


@pytest.fixture
def to_server(address: Address, tmp_path: Path) -> list[str]:
    assert address.api_key is not None
    return ["--base-url", address.base_url, "--api-key", address.api_key, "-o", str(tmp_path)]


def test_run_and_report(to_server: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE)
    one = bench("run", *to_server, "--workload", str(trace), "--max-model-len", "200",
                "--ttft-slo", "1m", "--name", "one/1", "--too-long", "cut")  # fmt: skip
    assert one.returncode == 0, one.stderr
    assert "2 cut for a context of 200 tokens" in one.stderr
    assert "of these too long and cut" in one.stdout
    assert "goodput, requests/s" in one.stdout
    two = bench("run", *to_server, "--workload", "interactive+batch", "--num-requests", "4",
                "--max-model-len", "60", "--rate", "inf", "--max-concurrency", "2",
                "--slo-class", "batch:ttft=1m")  # fmt: skip
    assert two.returncode == 0, two.stderr
    paths = [tmp_path / "run-one-1.json", tmp_path / f"run-{MODEL}.json"]
    reports = [read_report(path) for path in paths]
    for report, num_requests in zip(reports, (3, 4), strict=True):
        assert isinstance(report, RunReport)
        assert report.summary.num_requests == {"ok": num_requests}
        assert "secret" not in paths[0].read_text()
    assert reports[0].settings["ttft_slo_s"] == 60.0
    assert reports[0].notes.too_long is not None
    assert reports[0].notes.too_long.num_cut == 2

    both = bench("report", *map(str, paths), "-o", str(tmp_path / "both.html"))
    assert both.returncode == 0, both.stderr
    assert "one/1" in both.stdout
    page = (tmp_path / "both.html").read_text()
    assert "of these too long and cut" in page
    assert "one/1" in page
    assert MODEL in page
    assert (tmp_path / "run-one-1.html").exists()


def test_capacity_under_a_promise_that_nobody_can_keep(
    to_server: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(capacity_settings, "LEAST_S", 3.0)
    status = main(["bench", "capacity", *to_server, "--workload", "chat", "--num-requests", "2",
                   "--max-model-len", "40", "--itl-slo", "0.001ms", "--rate", "100"])  # fmt: skip
    assert status == 0
    report = read_report(tmp_path / f"capacity-{MODEL}.json")
    assert isinstance(report, CapacityReport)
    assert report.capacity.rate_per_s == 0.0
    assert [trial.rate_per_s for trial in report.capacity.trials[:2]] == [100.0, 50.0]
    # If no request finishes in time on a slow machine, there is no gap to measure.
    assert all(trial.broken for trial in report.capacity.trials)
    assert any("ITL" in trial.broken for trial in report.capacity.trials)
    assert "100/s not sustained" in capsys.readouterr().err


def test_probe(to_server: list[str], tmp_path: Path) -> None:
    done = bench("probe", *to_server, "--streams", "2", "--long", "600", "--longs", "2",
                 "--steady", "300ms", "--name", "probed")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TTFT of the long prompts" in done.stdout
    report = read_report(tmp_path / "probe-probed.json")
    assert isinstance(report, ProbeReport)
    assert len(report.result.long_ttfts_s) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--long", "2047"), "a long prompt of 2047 tokens and its output of 2 do not fit in"),
        (("--vocab-size", "49153"), f"vocab_size 49153: {MODEL} has 49152 tokens only"),
    ],
)
def test_probe_that_the_model_cannot_take(
    to_server: list[str], flags: tuple[str, ...], message: str
) -> None:
    done = bench("probe", *to_server, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(f"legato: {message}")


def test_help_names_every_mix() -> None:
    text = "".join(bench("run", "--help").stdout.split())
    assert all(name in text for name in MIXES)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run",), "--workload"),
        (("run", "--workload", "chat", "--base-url", "http://127.0.0.1:1"), "no OpenAI-compatible"),
        (("run", "--workload", "chat", "--rate", "0"), "--rate"),
        (("run", "--workload", "chat", "--slo-class", "batch:soon"), "--slo-class"),
        (("capacity", "--workload", "chat"), "--itl-slo"),
        (("report", "no-such.json"), "no-such.json"),
    ],
)
def test_user_errors_are_clear(args: tuple[str, ...], message: str) -> None:
    done = bench(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from legato.cli.main import main\n"
        "sys.exit(main(['bench', 'report', 'a.json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"legato: matplotlib missing: {install_command('bench')}\n"


def test_workloads_and_reports_need_no_http() -> None:
    code = (
        "import sys; sys.modules['httpx'] = sys.modules['torch'] = None\n"
        "import legato_lab.workload.choice, legato_lab.capacity.search\n"
        "import legato_lab.report.page, legato_lab.report.console"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_durations() -> None:
    texts = ("100ms", "35 ms", "1.5s", "2m", "1h", " 3s ", "0")
    assert [*map(duration_s, texts)] == [0.1, 0.035, 1.5, 120.0, 3600.0, 3.0, 0.0]
    for text in ("2", "0.25"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} of what?"):
            duration_s(text)
    for text in ("", "ms", "1 day", "-1s", "inf", "nan", "1.s", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a duration"):
            duration_s(text)
