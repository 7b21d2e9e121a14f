"""`legato tune` from outside."""

import json
import shlex
from pathlib import Path

import pytest

from legato.cli.main import main
from legato_lab.simulation.machine_file import write_machine
from tests.cli.test_main import legato
from tests.lab.tune.machines import CPU

CODE = ("--workload", "prompt p50=300 p90=900, output p50=4 p90=8", "--rate", "2")
SLOS = ("--itl-slo", "300ms", "--ttft-slo", "3s")


def test_on_the_machine(tmp_path: Path) -> None:
    """From the first measurement to a line that starts a server.

    A busy machine's step times are not kept. Each of the three servers would measure them again.
    """
    machine = ("--max-model-len", "512", "--max-num-batched-tokens", "128", "--max-num-seqs", "8",
               "--no-calibrate")  # fmt: skip
    workload = ("--workload", "prompt p50=60 p90=200, output p50=4 p90=8", "--rate", "2")
    durations = ("--record-duration", "3s", "--verify-duration", "2s", "--num-requests", "12")
    done = legato(
        *("tune", *machine, *workload, *SLOS, *durations, "--trials", "12", "--finalists", "2"),
        *("--calibration-dir", str(tmp_path), "-o", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("legato serve")]
    assert shlex.split(line)[shlex.split(line).index("--max-num-seqs") + 1] == "8"
    report = json.loads((tmp_path / "tune.json").read_text())
    finalists = report["finalists"]
    scores = [one["measured_score"] for one in finalists]
    assert scores == sorted(scores, reverse=True)
    assert finalists[0]["measured"]["num_requests"].keys() <= {"ok", "refused"}
    assert len(report["leads"]) == len(finalists) - 1
    assert report["budgets"][0]["measured_s"] > 0.0
    assert "<svg" in (tmp_path / "tune.html").read_text()
    assert (tmp_path / "machine.json").exists()


def test_on_a_machine_that_was_learned_before(tmp_path: Path) -> None:
    write_machine(tmp_path / "machine.json", CPU, {"model": "made up"})
    done = legato(
        *("tune", *CODE, *SLOS, "--num-requests", "10", "--trials", "12", "--finalists", "0"),
        *("--machine", str(tmp_path / "machine.json"), "--processes", "1", "-o", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert "what simulation says" in done.stdout
    assert json.loads((tmp_path / "tune.json").read_text())["machine_s"] == 0.0


def test_several_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--max-num-batched-tokens", "512", "--prefill-order", "fcfs", "--shed-load")
    status = main(
        [
            *("tune", *CODE, *SLOS, "--num-requests", "6", "--trials", "2", "--finalists", "0"),
            *("--machine", "smollm2-135m-cpu", "--replicas", "2", "--processes", "1"),
            *(*settings, "-o", str(tmp_path)),
        ]
    )
    told = capsys.readouterr()
    assert status == 0, told.err
    splits = json.loads((tmp_path / "tune.json").read_text())["splits"]
    assert {one["split"] for one in splits} == {"2 both", "1 prefill + 1 decode"}
    assert "chunked prefill alone" in told.out.lower()
    assert "compute prompts" in told.out
    for one in splits:
        assert (one["settings"]["prefill"] is not None) == one["is_apart"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "none is set"),
        ((*SLOS, "--machine", "nowhere.json"), "nowhere.json"),
        ((*SLOS, "--no-enable-chunked-prefill"), "chunked prefill"),
        ((*SLOS, "--too-long", "refuse", "--max-model-len", "100"), "--too-long drop"),
    ],
)
def test_what_cannot_be_tuned(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *CODE, *flags]) == 2
    assert message in capsys.readouterr().err
