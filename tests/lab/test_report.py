"""Reports: written, read again, side by side on a page."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from legato.cli.table import Table, duration
from legato.core.errors import ConfigError
from legato.core.slo import SloClass
from legato_lab.capacity.rule import CapacityRule
from legato_lab.capacity.search import Capacity
from legato_lab.capacity.trial import Load
from legato_lab.capacity.unloaded import UnloadedTtft
from legato_lab.report.page import render_page
from legato_lab.report.plots import plots
from legato_lab.report.report_file import (
    CapacityReport,
    ProbeReport,
    Report,
    RunReport,
    read_report,
    write_report,
)
from legato_lab.report.tables import tables
from legato_lab.simulation.summary import Slos
from legato_lab.workload.notes import WorkloadNotes
from legato_lab.workload.too_long import TooLong
from tests.lab.test_capacity import GOOD_S, LATE_S
from tests.lab.test_capacity import record as capacity_record
from tests.lab.test_probe import RESULT
from tests.lab.test_summary import ALL, REFUSED, record

RULE = CapacityRule(itl_slo_s=0.1, unloaded=UnloadedTtft([150], [2.0]))
TRIALS = [
    RULE.judge(Load(rate_per_s=1.0, measured_s=60.0), [capacity_record(0.1, [GOOD_S])]),
    RULE.judge(Load(rate_per_s=2.0, measured_s=60.0), [capacity_record(3.0, [LATE_S])]),
    RULE.judge(Load(rate_per_s=1.5, measured_s=60.0), [capacity_record(None)]),
]
SLOS = Slos(default=SloClass(ttft_s=0.5), by_class={"batch": SloClass()})
CLASSES = [*ALL, record(0.0, 1.0, 2.0, slo_class="batch")]
REPORTS: list[Report] = [
    RunReport.of("Legato <128> & co", {"rate": 2.0, "source": "a<b"}, SLOS, CLASSES),
    RunReport.of("nothing came back", {}, Slos(), [REFUSED]),
    CapacityReport(
        name="a search",
        settings={},
        capacity=Capacity(rates_per_s=[1.0, 1.5], num_source_requests=9, rule=RULE, trials=TRIALS),
    ),
    ProbeReport(name="a probe", settings={}, result=RESULT),
    ProbeReport(name="another probe", settings={}, result=RESULT),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_round_trip(tmp_path: Path, report: Report) -> None:
    path = tmp_path / "new" / "report.json"
    write_report(path, report)
    assert read_report(path) == report


@pytest.mark.parametrize("text", ["", "{}", '{"type": "other"}', '{"type": "run", "name": 1}'])
def test_not_a_report(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json as a report"):
        read_report(path)
    with pytest.raises(ConfigError, match=r"missing\.json as a report"):
        read_report(tmp_path / "missing.json")


def column(table: Table, name: str) -> dict[str, str]:
    index = table.header.index(name)
    return {row[0]: row[index] for row in table.rows}


def test_tables_put_reports_side_by_side() -> None:
    by_title = {table.title: table for table in tables(REPORTS)}
    assert list(by_title) == [
        "Runs",
        "Failures: Legato <128> & co",
        "Capacity",
        "Trials: a search",
        "Long prompts",
    ]
    runs = by_title["Runs"]
    assert runs.header[1:] == [
        "Legato <128> & co",
        "Legato <128> & co: batch",
        "nothing came back",
    ]
    first, batch = column(runs, runs.header[1]), column(runs, runs.header[2])
    assert (first["requests finished"], first["refused"], first["failed"]) == ("4", "1", "1")
    assert (first["TTFT p50"], first["TTFT max"]) == ("750 ms", "2.00 s")
    assert first["SLO attained"] == "42.9%"
    assert batch["SLO attained"] == batch["goodput, requests/s"] == "–"
    assert column(runs, "nothing came back")["ITL p99"] == "–"
    assert by_title["Failures: Legato <128> & co"].rows == [["broke off", "1"]]
    capacity = column(by_title["Capacity"], "a search")
    assert capacity["capacity, requests/s"] == "1.25"
    assert capacity["95 % interval"] == "0 to 4.43"
    assert (capacity["requests there"], capacity["ITL p99 there"]) == ("1", "62 ms")
    trials = by_title["Trials: a search"]
    assert [row[0] for row in trials.rows] == ["1/s", "1.5/s", "2/s"]
    assert [row[trials.header.index("median delay")] for row in trials.rows] == [
        "100 ms",
        "–",
        "3.00 s",
    ]
    assert [row[-1] for row in trials.rows] == ["yes", "no: delay, failures", "no: ITL, delay"]
    assert column(by_title["Long prompts"], "a probe")["TTFT of the long prompts"] == (
        "1.50 s, 3.00 s"
    )
    assert tables([]) == []


def test_many_reports_have_a_row_each() -> None:
    runs = [msgspec.structs.replace(REPORTS[0], name=f"policy {n}") for n in range(9)]
    by_title = {table.title: table for table in tables([*runs, *[REPORTS[2]] * 9])}
    names = [name for n in range(9) for name in (f"policy {n}", f"policy {n}: batch")]
    assert [row[0] for row in by_title["Runs"].rows] == names
    assert [row[0] for row in by_title["Latencies"].rows] == names
    assert "ITL p99" in by_title["Latencies"].header
    assert "ITL p99" not in by_title["Runs"].header
    assert [row[0] for row in by_title["Capacity"].rows] == ["a search"] * 9


def test_what_a_workload_lacks_stands_above_what_came_of_it(tmp_path: Path) -> None:
    notes = WorkloadNotes(
        too_long=TooLong(max_model_len=8192, num_requests=300, num_cut=162, share_of_tokens=0.6),
        num_bad_rows=3,
        first_bad_row="trace.csv:7: 2 values, but 3 columns",
    )
    run, _, search, *_ = REPORTS
    lacking = [msgspec.structs.replace(one, notes=notes) for one in (run, search)]
    first, *others = tables([run, *lacking])
    assert first.header == ["", "Legato <128> & co", "a search"]
    assert column(first, "a search") == {
        "context, tokens": "8192",
        "requests that were chosen": "300",
        "of these too long and cut": "162",
        "of these too long and dropped": "0",
        "prompt tokens missing": "60.0%",
        "malformed rows skipped": "3",
        "rows without an answer": "0",
    }
    assert first.title not in [table.title for table in others]
    write_report(tmp_path / "report.json", lacking[0])
    assert read_report(tmp_path / "report.json") == lacking[0]


@pytest.mark.parametrize("reports", [REPORTS, REPORTS[1:2], REPORTS[2:3], REPORTS[3:4]])
def test_page_is_well_formed_and_needs_nothing_else(reports: list[Report]) -> None:
    page = ElementTree.fromstring(render_page(reports))
    text = "".join(page.itertext())
    assert all(report.name in text for report in reports)
    names = {element.tag.rpartition("}")[2] for element in page.iter()}
    assert "svg" in names
    assert not names & {"script", "link", "iframe", "img"}
    links = [value for element in page.iter() for key, value in element.items() if "href" in key]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)


def test_a_plot_names_each_capacity() -> None:
    search = REPORTS[2]
    assert isinstance(search, CapacityReport)
    lost = [msgspec.structs.replace(trial, broken=["delay"]) for trial in search.capacity.trials]
    none = msgspec.structs.replace(search.capacity, rates_per_s=[0.0], trials=lost)
    reports = [search, msgspec.structs.replace(search, name="nothing", capacity=none)]
    for shown in (reports, reports[:1], reports[1:]):
        text = "".join(ElementTree.fromstring(render_page(shown)).itertext())
        assert all(report.name in text for report in shown)
        bars, _ = plots(shown)
        assert ("1.25" in bars) == (search in shown)
        assert bars.count('id="xtick_') >= 4


def test_durations_are_for_people() -> None:
    values_s = (None, 0.0004, 0.035, -0.2, 0.9, 1.25, 75.0)
    shown = ["–", "0.4 ms", "35 ms", "-200 ms", "900 ms", "1.25 s", "75.00 s"]
    assert [duration(value_s) for value_s in values_s] == shown
