"""One run of a benchmark: where it prints, and what is written of it."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.status import Status

from benchmarks.runner.catalog import Benchmark
from benchmarks.runner.machine import Load, Machine, Watch, commit, load_before
from legato.cli.table import Table, print_table
from legato.core.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
_DOTS_PER_INCH = 120
_MOST_INDENTED_BYTES = 2**20


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is written of a run.

    Attributes:
        flags: as they were read; key the flag's name.
        before: what the machine did in the second before.
        during: what it did meanwhile.
    """

    benchmark: str
    question: str
    begun: datetime
    flags: dict[str, Any]
    version: str
    commit: str | None
    machine: Machine
    before: Load
    during: Load
    figures: Any


class Run:
    """What a benchmark is given.

    Attributes:
        flags: as the parser has read them.
        console: prints results. What is only of interest meanwhile goes to standard error.
    """

    def __init__(self, benchmark: Benchmark, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        self._aside = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._benchmark = benchmark
        self._paths: list[Path] = []
        self._begun = datetime.now(UTC)
        self._before = load_before()
        self._watch = Watch()

    @property
    def paths(self) -> list[Path]:
        """The files that have been asked for so far."""
        return list(self._paths)

    def path(self, ending: str) -> Path:
        """A file to write: the benchmark's name with an ending, in the folder of `--out`."""
        name = self._benchmark.name.rpartition(".")[2]
        return self.file(f"{name}{ending}")

    def file(self, name: str) -> Path:
        """The same, by its whole name."""
        folder: Path = self.flags.out
        folder.mkdir(parents=True, exist_ok=True)
        self._paths.append(folder / name)
        return self._paths[-1]

    def tell(self, text: object) -> None:
        """Print what happens, a line each."""
        self._aside.print(text)

    def status(self, text: str) -> AbstractContextManager[Status]:
        """Show what is going on, until the block ends."""
        return self._aside.status(text)

    def track(self, items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        """Show how many of some items are done."""
        return iter(track(items, description, total=total, console=self._aside, transient=True))

    def show(self, table: Table) -> None:
        """Print a result."""
        print_table(table)

    def picture(self, figure: "Figure") -> None:
        """Save a figure as the benchmark's picture."""
        figure.savefig(self.path(".png"), dpi=_DOTS_PER_INCH)

    def write(self, figures: object) -> None:
        """Write all figures as JSON, beside what they were measured with and on.

        Call it once, when everything is measured.
        """
        record = Record(
            benchmark=self._benchmark.name,
            question=self._benchmark.question,
            begun=self._begun,
            flags=msgspec.to_builtins(vars(self.flags), enc_hook=str),
            version=__version__,
            commit=commit(),
            machine=Machine.here(),
            before=self._before,
            during=self._watch.load(),
            figures=figures,
        )
        text = msgspec.json.encode(record, enc_hook=_plain)
        self.path(".json").write_bytes(
            text if len(text) > _MOST_INDENTED_BYTES else msgspec.json.format(text)
        )
        self.console.print(str(record.machine))
        self.console.print(f"Others kept busy, before: {record.before}; during: {record.during}")


def _plain(value: Any) -> Any:
    """A NumPy number or array as Python's own, a path as text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError
