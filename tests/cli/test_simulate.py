"""`legato simulate` from outside."""

import subprocess
import sys
from pathlib import Path

import pytest

from legato.cli.main import main
from legato_lab.report.report_file import CapacityReport, RunReport, read_report
from tests.cli.test_main import legato

CHAT = ("--workload", "chat", "--num-requests", "20")


def test_policies_side_by_side_and_beside_other_reports(tmp_path: Path) -> None:
    flags = (*CHAT, "--rate", "1", "--itl-slo", "100ms", "--ttft-slo", "2s", "-o", str(tmp_path))
    done = legato("simulate", *flags, "--policy", "slo:fcfs", "--policy", "fixed:512")
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("slo:fcfs", "fixed:512", "ITL p99"))
    assert "slo:fcfs</th>" in (tmp_path / "simulated-run.html").read_text()
    reports = sorted(map(str, tmp_path.glob("*.json")))
    assert len(reports) == 2
    both = legato("bench", "report", *reports, "-o", str(tmp_path / "both.html"))
    assert both.returncode == 0
    assert "<svg" in (tmp_path / "both.html").read_text()


def test_the_defaults_need_no_slo(tmp_path: Path) -> None:
    done = legato("simulate", "--workload", "summarize", "--num-requests", "5", "--max-model-len",
                  "1000", "-o", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("fixed:512", "prefill-first:512"))
    assert "of 5 requests, 5 cut for a context of 1000 tokens" in done.stderr
    assert "of these too long and cut" in done.stdout


def test_fleets_side_by_side(tmp_path: Path) -> None:
    flags = (*CHAT, "--rate", "2", "--itl-slo", "100ms", "--ttft-slo", "2s", "-o", str(tmp_path))
    fleets = ("--fleet", "2 both", "--fleet", "1 prefill + 1 decode", "--routing", "round-robin",
              "--link-bandwidth", "1G", "--link-latency", "5ms")  # fmt: skip
    done = legato("simulate", *flags, *fleets)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("2 both", "1 prefill + 1 decode", "SLO attained"))
    names = [path.name for path in tmp_path.glob("*.json")]
    assert sorted(names) == ["simulated-run-1-prefill-1-decode.json", "simulated-run-2-both.json"]


def test_capacity(tmp_path: Path) -> None:
    flags = ("--workload", "prompt p50=500, output p50=3", "--num-requests", "50", "--rate", "4",
             "--itl-slo", "100ms", "--seeds", "2", "--precision", "0.5")  # fmt: skip
    done = legato("simulate", *flags, "--capacity", "--policy", "fixed:512", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "capacity, requests/s" in done.stdout
    report = read_report(tmp_path / "simulated-capacity-fixed-512.json")
    assert isinstance(report, CapacityReport)
    assert len(report.capacity.rates_per_s) == 2
    assert all(trial.measured_s >= 120.0 for trial in report.capacity.best)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "slo"), "policy slo keeps an ITL or TPOT SLO"),
        (("--too-long", "refuse", "--max-model-len", "500"), "longer than the context of 500"),
        (("--too-long", "shrink"), "--too-long"),
        (("--columns", "prompt"), "'prompt' is not of the form"),
        (("--capacity",), "--itl-slo"),
        (("--capacity", "--itl-slo", "1s", "--arrivals", "trace"), "Poisson arrivals"),
        (("--capacity", "--itl-slo", "1s", "--time-scale", "2"), "only a file has arrivals"),
        (("--capacity", "--itl-slo", "1s", "--duration", "9s"), "at least 120 s"),
        (("--capacity", "--itl-slo", "1s", "--attainment", "99"), "--attainment"),
        (("--time-scale", "inf", "--policy", "fixed"), "--time-scale"),
        (("--capacity", "--itl-slo", "1s", "--trace", "t.jsonl"), "--trace is of one run"),
        (("--policy", "fixed", "--trace", "trace.txt"), ".jsonl"),
        (("--policy", "best"), "no policy 'best'"),
        (("--policy", "fixed", "--profile", "abacus"), "no file or profile 'abacus'"),
        (("--policy", "fixed", "--truth-error", "1"), "--truth-error"),
        (("--policy", "fixed", "--shed-load"), "TTFT SLO"),
        (("--policy", "fixed", "--kv-cache-tokens", "100"), "does not fit"),
        (("--policy", "fixed", "--max-num-seqs", "none"), "--max-num-seqs"),
        (("--policy", "fixed", "--slo-class", "gold:soon"), "--slo-class"),
        (("--fleet", "4"), "'4' is no fleet"),
        (("--fleet", "2 prefill"), "needs prefill and decode"),
        (("--routing", "round-robin"), "there is no --fleet"),
        (("--fleet", "2 both", "--trace", "t.jsonl"), "--trace is of one engine"),
        (("--fleet", "2 both", "--link-bandwidth", "0"), "--link-bandwidth"),
    ],
)
def test_user_errors(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["simulate", *CHAT, *flags])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_neither_torch_nor_a_server_is_needed() -> None:
    code = (
        "import sys, legato_lab.load.simulated_sessions\n"
        "sys.exit(str({'torch', 'httpx'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_simulated_run_can_be_explained(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = (*CHAT, "--rate", "2", "-o", str(tmp_path), "--trace", str(trace))
    done = legato("simulate", *flags, "--policy", "fixed:512", "--policy", "fixed:64")
    assert done.returncode == 0, done.stderr
    for policy in ("fixed-512", "fixed-64"):
        told = legato("explain", str(tmp_path / f"trace-{policy}.jsonl"), "7")
        assert told.returncode == 0, told.stderr
        assert "computing its own prompt" in told.stdout


def test_a_fleet_whose_machines_die_and_whose_clients_come_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "legato_lab.commands.simulate._MOST_RECORDS", 10
    )  # so that figures are tallied
    flags = ("--rate", "2", "--itl-slo", "100ms", "--ttft-slo", "2s", "-o", str(tmp_path))
    fleet = ("--fleet", "2 both", "--max-replicas", "3", "--replica-mtbf", "5s", "--replica-start",
             "2s", "--max-retries", "3", "--shed-load")  # fmt: skip
    assert main(["simulate", *CHAT, *flags, *fleet]) == 0
    told = capsys.readouterr().out
    assert all(text in told for text in ("of these died", "Replicas: 2 both", "both-0", "TTFT p99"))
    report = read_report(tmp_path / "simulated-run-2-both.json")
    assert isinstance(report, RunReport)
    assert report.fleet is not None
    assert not report.records
    counts = report.summary.num_requests
    assert sum(counts.values()) == 20
    assert counts.get("error", 0) == report.fleet.num_lost == sum(report.failures.values())
