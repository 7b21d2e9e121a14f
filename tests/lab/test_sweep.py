"""Sweeps: what is sent at each load by hand, and on a real server."""

import itertools
from pathlib import Path

import msgspec
import pytest

from legato.cli.main import main
from legato_lab.report.report_file import SweepReport, read_report
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import WorkloadRequest, mean_rate_per_s
from legato_lab.sweep import Throughput, at_rate, closed_loop
from legato_lab.workload.choice import WorkloadChoice
from tests.lab.test_cli import bench, to_server

__all__ = ["to_server"]

WORKLOAD = "prompt p50=20 p99=40, output p50=4 p99=8"
CHOICE = WorkloadChoice(source=WORKLOAD)


def test_a_rate_lasts_as_long_as_asked_for() -> None:
    lasting = WorkloadChoice(source=WORKLOAD, duration_s=50.0)
    for choice, rate, num_requests in (
        (CHOICE, 4.0, 240),
        (CHOICE, 0.01, 20),
        (lasting, 4.0, 200),
        (WorkloadChoice(source=WORKLOAD, num_requests=30), 4.0, 30),
    ):
        workload = at_rate(choice, rate)
        assert len(workload) == num_requests
        assert mean_rate_per_s(workload) == pytest.approx(rate, rel=0.5)


@pytest.mark.parametrize(("asked", "sent"), [(50, 50), (3, 9)])
def test_a_closed_loop_goes_round(asked: int, sent: int) -> None:
    """Most requests are sent behind others, even if fewer were asked for."""
    requests = list(closed_loop(WorkloadChoice(source=WORKLOAD, num_requests=asked), 4))
    assert len(requests) == sent
    assert {request.arrival_s for request in requests} == {0.0}
    assert all(request == requests[index % asked] for index, request in enumerate(requests))
    endless = list(itertools.islice(closed_loop(CHOICE, 4), 1100))
    assert endless[1000:] == endless[:100]


def record(sent_s: float, *token_times_s: float, num_tokens: int | None = None) -> RequestRecord:
    return RequestRecord(
        request=WorkloadRequest(sent_s, 10, len(token_times_s)),
        sent_s=sent_s,
        status="ok",
        token_times_s=list(token_times_s),
        num_tokens=num_tokens or len(token_times_s),
    )


def test_throughput_is_that_under_the_whole_load() -> None:
    """Each request takes 2 s, so that the window is from 2.0 to 8.0."""
    records = [record(float(at), at + 1.0, at + 2.0) for at in range(9)]
    throughput = Throughput.of(records)
    assert throughput.requests_per_s == 1.0
    assert throughput.output_tokens_per_s == 2.0
    together = [record(float(at), at + 1.0, at + 2.0, num_tokens=4) for at in range(9)]
    assert Throughput.of(together).output_tokens_per_s == 4.0
    for none in ([], [record(0.0, 1.0), record(0.0, 2.0)]):
        assert Throughput.of(none).requests_per_s == 0.0


def test_sweep_of_a_server(
    to_server: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three numbers in flight, one of them in a call that goes on; then side by side."""
    sweep = ["bench", "sweep", *to_server, "--workload", WORKLOAD, "--num-requests", "9"]
    loop = [*sweep, "--itl-slo", "1s", "--name", "a loop", "--concurrencies"]
    assert main([*loop, "4,1"]) == 0
    assert "4 in flight: " in capsys.readouterr().err
    path = tmp_path / "sweep-a-loop.json"
    written = read_report(path)
    assert main([*loop, "1,2,4", "--resume"]) == 0
    report = read_report(path)
    assert isinstance(written, SweepReport)
    assert isinstance(report, SweepReport)
    assert [point.load for point in report.points] == [1, 2, 4]
    assert [report.points[0], report.points[2]] == written.points
    for point in report.points:
        assert point.run.summary.num_requests == {"ok": 9}
        assert point.throughput.output_tokens_per_s > 0.0
        assert _most_in_flight(point.run.records) == point.load
    assert main([*loop, "1", "--resume", "--seed", "1"]) == 2
    assert "cannot be resumed" in capsys.readouterr().err

    assert main([*sweep, "--name", "rates", "--rates", "20"]) == 0
    page = tmp_path / "both.html"
    paths = [str(path), str(tmp_path / "sweep-rates.json")]
    assert main(["bench", "report", *paths, "-o", str(page)]) == 0
    assert page.read_text().count("<svg") == 1
    assert main(["bench", "compare", paths[0], paths[0], "-o", str(page)]) == 0
    assert "Comparison: 2 in flight" in page.read_text()
    assert main(["bench", "compare", *paths, "-o", str(page)]) == 2


def _most_in_flight(records: list[RequestRecord]) -> int:
    changes = [(r.sent_s, 1) for r in records] + [(r.last_event_s, -1) for r in records]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def test_a_server_that_fails_every_request_is_left_in_peace(
    to_server: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no such class, and says so at once."""
    workload = tmp_path / "workload.jsonl"
    workload.write_bytes(msgspec.json.encode(WorkloadRequest(0.0, 20, 4, "no-such-class")))
    flags = ["--workload", str(workload), "--concurrencies", "4"]
    assert main(["bench", "sweep", *to_server, *flags]) == 1
    told = capsys.readouterr().err
    assert "4 in flight: " in told
    assert "requests failed, and 0 finished" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of the arguments --rates --concurrencies is required"),
        (("--rates", "1,inf"), "--rates"),
        (("--concurrencies", "0"), "--concurrencies"),
        (("--rates", "1", "--concurrencies", "1"), "not allowed with"),
    ],
)
def test_loads_that_are_none(flags: tuple[str, ...], message: str) -> None:
    done = bench("sweep", "--workload", "chat", *flags)
    assert done.returncode == 2
    assert message in done.stderr


def test_simulated_sweep_of_two_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate = ["simulate", "--workload", "prompt p50=200, output p50=20", "-o", str(tmp_path)]
    assert main([*simulate, "--rates", "4,1", "--duration", "30s", "--itl-slo", "120ms"]) == 0
    capsys.readouterr()
    for policy in ("slo", "fixed-512"):
        report = read_report(tmp_path / f"simulated-sweep-{policy}.json")
        assert isinstance(report, SweepReport)
        assert [(point.load, len(point.run.records)) for point in report.points] == [
            (1.0, 30),
            (4.0, 120),
        ]
        slow, fast = (point.throughput.output_tokens_per_s for point in report.points)
        assert fast > 2 * slow
    assert (tmp_path / "simulated-sweep.html").read_text().count("<svg") == 1
    assert main([*simulate, "--rates", "1", "--rate", "1"]) == 2
    assert "--rates takes the place of --rate" in capsys.readouterr().err
