"""A benchmark's report: one JSON file with all settings and measurements."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from legato.core.errors import ConfigError
from legato_lab.capacity.search import Capacity
from legato_lab.report.fleet_figures import FleetFigures
from legato_lab.simulation.record import ProbeResult, RequestRecord
from legato_lab.simulation.summary import Slos, Summary, summarize, summarize_classes
from legato_lab.simulation.tally import Tally
from legato_lab.sweep import LoadKind, Throughput
from legato_lab.workload.notes import NO_NOTES, WorkloadNotes


class RunReport(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One workload sent once.

    Attributes:
        name: distinguishes it in comparisons.
        settings: of the run; key a flag's name.
        by_class: key the SLO class; empty if no request names one.
        records: empty if there were too many to keep.
        failures: number of requests by error.
        notes: what the workload lacks.
        fleet: of a simulated fleet.
    """

    name: str
    settings: dict[str, Any]
    slos: Slos
    summary: Summary
    by_class: dict[str, Summary]
    records: list[RequestRecord]
    failures: dict[str, int] = {}
    notes: WorkloadNotes = NO_NOTES
    fleet: FleetFigures | None = None

    @classmethod
    def of(
        cls,
        name: str,
        settings: dict[str, Any],
        slos: Slos,
        records: Sequence[RequestRecord],
        notes: WorkloadNotes = NO_NOTES,
    ) -> "RunReport":
        return cls(
            name=name,
            settings=settings,
            slos=slos,
            summary=summarize(records, slos),
            by_class=summarize_classes(records, slos),
            records=list(records),
            failures=dict(Counter(r.error for r in records if r.error is not None)),
            notes=notes,
        )

    @classmethod
    def tallied(
        cls,
        name: str,
        settings: dict[str, Any],
        tally: Tally,
        notes: WorkloadNotes = NO_NOTES,
    ) -> "RunReport":
        """Make a report of a run whose records were not kept."""
        return cls(
            name=name,
            settings=settings,
            slos=tally.slos,
            summary=tally.summary(),
            by_class=tally.by_class(),
            records=[],
            failures=dict(tally.failures),
            notes=notes,
        )


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True, tag="capacity"):
    """One search for the capacity of a server. Attributes: as in `RunReport`."""

    name: str
    settings: dict[str, Any]
    capacity: Capacity
    notes: WorkloadNotes = NO_NOTES


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Streams beside which long prompts came. Attributes: as in `RunReport`."""

    name: str
    settings: dict[str, Any]
    result: ProbeResult


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a sweep.

    Attributes:
        load: requests a second, or requests in flight.
        throughput: while requests were sent.
        run: without settings of its own.
    """

    load: float
    throughput: Throughput
    run: RunReport


class SweepReport(msgspec.Struct, frozen=True, kw_only=True, tag="sweep"):
    """The same workload under one load after another. Attributes: else as in `RunReport`.

    Attributes:
        points: by load.
        notes: on all requests that the points draw from.
    """

    name: str
    settings: dict[str, Any]
    load_kind: LoadKind
    points: list[SweepPoint]
    notes: WorkloadNotes = NO_NOTES

    def point(self, load: float, slos: Slos, records: Sequence[RequestRecord]) -> SweepPoint:
        """Make the point of one load from its records."""
        name = f"{self.name}, {self.load_kind.describe(load)}"
        run = RunReport.of(name, {}, slos, records)
        return SweepPoint(load=load, throughput=Throughput.of(records), run=run)

    def with_point(self, point: SweepPoint) -> "SweepReport":
        """Return the report with one more point."""
        points = sorted([*self.points, point], key=lambda point: point.load)
        return msgspec.structs.replace(self, points=points)


Report = RunReport | CapacityReport | ProbeReport | SweepReport


def by_kind(
    reports: Iterable[Report],
) -> tuple[list[RunReport], list[CapacityReport], list[ProbeReport], list[SweepReport]]:
    """Group reports by kind."""
    runs, capacities, probes, sweeps = [], [], [], []
    for report in reports:
        match report:
            case RunReport():
                runs.append(report)
            case CapacityReport():
                capacities.append(report)
            case ProbeReport():
                probes.append(report)
            case SweepReport():
                sweeps.append(report)
    return runs, capacities, probes, sweeps


def write_report(path: Path, report: msgspec.Struct) -> None:
    """Write a report as JSON; create the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(report))


def read_report(path: Path) -> Report:
    """Read what `write_report` wrote.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        report: Report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path} as a report: {error}") from error
    return report
