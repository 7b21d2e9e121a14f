"""What is told from noise, against runs whose difference is known."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from legato.cli.main import main
from legato.core.slo import SloClass
from legato_lab.bootstrap import resampled
from legato_lab.comparison import Difference, compare, unlike_requests, unlike_settings
from legato_lab.report.report_file import ProbeReport, RunReport, write_report
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos
from legato_lab.simulation.workload import WorkloadRequest
from tests.lab.test_probe import RESULT

SLOS = Slos(default=SloClass(itl_s=0.12))
NUM_TOKENS = 20


def run(
    name: str, gap_s: float, *, seed: int, num_requests: int = 100, **settings: object
) -> RunReport:
    """Requests one second apart, whose gaps vary by a tenth."""
    rng = np.random.default_rng(seed)
    records = []
    for index in range(num_requests):
        gaps_s = gap_s * (1.0 + 0.1 * rng.standard_normal(NUM_TOKENS).clip(-2, 2))
        times_s = (index + np.cumsum(gaps_s)).tolist()
        request = WorkloadRequest(float(index), 10 + index % 7, NUM_TOKENS)
        records.append(
            RequestRecord(
                request=request,
                sent_s=float(index),
                status="ok",
                token_times_s=times_s,
                num_tokens=NUM_TOKENS,
            )
        )
    return RunReport.of(name, dict(settings), SLOS, records)


def by_name(differences: list[Difference]) -> dict[str, Difference]:
    return {difference.name: difference for difference in differences}


def test_a_change_is_told_with_its_size() -> None:
    found = by_name(compare(run("a", 0.1, seed=1), run("b", 0.08, seed=2)))
    for name in ("ITL p50", "ITL p99", "TPOT p50", "E2E p50", "TTFT p50"):
        difference = found[name]
        assert difference.relative == pytest.approx(-0.2, abs=0.03), name
        assert difference.low is not None
        assert difference.high is not None
        assert difference.low <= difference.relative <= difference.high
        assert difference.is_sure
        assert difference.is_better
    assert found["ITL max"].low is None
    assert found["SLO attained"].is_better
    back = by_name(compare(run("b", 0.08, seed=2), run("a", 0.1, seed=1)))["ITL p50"]
    assert (back.is_sure, back.is_better) == (True, False)
    assert back.relative == pytest.approx(0.25, abs=0.03)


def test_noise_is_not_taken_for_a_change() -> None:
    sure = [
        difference.name
        for seed in range(10)
        for difference in compare(run("a", 0.1, seed=seed), run("b", 0.1, seed=seed + 100))
        if difference.is_sure
    ]
    assert len(sure) <= 10, f"{sure} of 190"


def test_no_difference_from_oneself() -> None:
    same = run("a", 0.1, seed=1)
    for difference in compare(same, same):
        assert difference.relative == 0.0
        assert not difference.is_sure


def test_what_there_is_not_has_no_difference() -> None:
    nothing = RunReport.of("nothing", {}, Slos(), [])
    found = by_name(compare(nothing, run("a", 0.1, seed=1)))
    assert found["ITL p50"].first is found["ITL p50"].relative is found["ITL p50"].low is None
    assert "SLO attained" not in found, "nothing was promised"


def test_a_resample_keeps_neighbours_together() -> None:
    picks = resampled(10, num_resamples=50, seed=0, num_together=4)
    assert picks.shape == (50, 10)
    assert {int(pick) for pick in picks.ravel()} == set(range(10))
    assert ((picks[:, 1:4] - picks[:, :3]) % 10 == 1).all()
    assert ((picks[:, 5:8] - picks[:, 4:7]) % 10 == 1).all()


def test_what_is_not_alike_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run("one", 0.1, seed=1, rate=1.0, workload="chat")
    more = run("other", 0.1, seed=2, num_requests=120, rate=2.0, workload="chat")
    assert [(u.name, u.first, u.second) for u in unlike_settings(one, more)] == [
        ("rate", "1.0", "2.0")
    ]
    assert unlike_requests(one, more, "Comparison") == [], "the same, and some more"
    others = msgspec.structs.replace(more, records=more.records[::-1])
    [told] = unlike_requests(one, others, "Comparison")
    assert told.second == "120, mean 13 + 20 tokens"

    paths = [str(tmp_path / f"{index}.json") for index in range(3)]
    for path, report in zip(
        paths, (one, others, ProbeReport(name="p", settings={}, result=RESULT)), strict=True
    ):
        write_report(Path(path), report)
    page = tmp_path / "compare.html"
    assert main(["bench", "compare", *paths[:2], "-o", str(page)]) == 0
    told_to_all = capsys.readouterr()
    assert "not alike in: rate, Comparison: requests" in told_to_all.err
    assert "95 % interval" in told_to_all.out
    assert "95 % interval" in page.read_text()
    assert main(["bench", "compare", *paths[1:]]) == 2
    assert "compare takes two runs" in capsys.readouterr().err
