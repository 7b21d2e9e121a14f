"""The machine that figures are of, and what else it did meanwhile."""

import os
import platform
import resource
import subprocess
import time
from importlib import import_module
from pathlib import Path

import msgspec
import psutil

_REPOSITORY = Path(__file__).parents[2]
_EXTENSIONS = ("avx", "amx", "asimd", "sve", "bf16", "i8mm")
"""How the flags of a processor begin that speed depends on."""
_BEFORE_S = 1.0
_MOST_NAMED = 5
_LEAST_NAMED = 0.01  # of a processor
_SETTLED = 0.1  # processors that servers without work keep busy, at most
_LONGEST_SETTLED_S = 60.0
_IDLE = ("idle", "iowait")
_IN_OTHERS = ("guest", "guest_nice")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine.

    Attributes:
        processor: its name.
        instructions: sets of instructions beyond its architecture's own.
        kernels: those of Legato that run there, fastest first.
        num_cores: that a program may use.
    """

    processor: str
    instructions: list[str]
    kernels: list[str]
    num_cores: int
    memory_bytes: int
    system: str

    @classmethod
    def here(cls) -> "Machine":
        told = _cpu_info()
        flags = told.get("flags") or told.get("Features") or ""
        return cls(
            processor=told.get("model name") or platform.processor() or platform.machine(),
            instructions=[flag for flag in flags.split() if flag.startswith(_EXTENSIONS)],
            kernels=_kernels(),
            num_cores=len(os.sched_getaffinity(0)),
            memory_bytes=psutil.virtual_memory().total,
            system=platform.platform(),
        )

    def __str__(self) -> str:
        kernels = ", ".join(self.kernels) or "no native kernels"
        return f"{self.num_cores} cores of {self.processor} ({kernels})"


def _cpu_info() -> dict[str, str]:
    """Of the first processor, where Linux tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kernels() -> list[str]:
    try:
        found: list[str] = import_module("legato._processor").instructions()
    except ImportError:
        return []
    return found


def commit() -> str | None:
    """The commit that is measured, with a "+" where files differ from it; None without git."""
    try:
        name = _git("rev-parse", "HEAD")
        return f"{name}+" if _git("status", "--porcelain", "--untracked-files=no") else name
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(_REPOSITORY), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine did for some time, in processors kept busy on average.

    Attributes:
        load_average: of the last 1, 5 and 15 minutes, at the end.
        own: by the benchmark and all processes below it, its servers among them.
        others: by all other processes, including ended ones.
        busiest: the busiest of the others that were there at the beginning and the end; key its
            name and pid.
    """

    seconds: float
    load_average: tuple[float, float, float]
    own: float
    others: float
    busiest: dict[str, float]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {busy:.2f}" for name, busy in self.busiest.items())
        return f"{self.others:.2f} processors{f' ({named})' if named else ''}"


class Watch:
    """Measures a load from when it is made."""

    def __init__(self) -> None:
        self._began = _Reading()

    def load(self) -> Load:
        """The load so far."""
        began, now = self._began, _Reading()
        seconds = now.at_s - began.at_s
        own = (now.own_s - began.own_s) / seconds
        others = {
            key: (spent_s - began.others_s[key]) / seconds
            for key, spent_s in now.others_s.items()
            if key in began.others_s
        }
        named = sorted(others.items(), key=lambda item: -item[1])[:_MOST_NAMED]
        return Load(
            seconds=seconds,
            load_average=os.getloadavg(),
            own=own,
            others=max(0.0, (now.busy_s - began.busy_s) / seconds - own),
            busiest={_told(pid): busy for (pid, _), busy in named if busy >= _LEAST_NAMED},
        )


def _told(pid: int) -> str:
    """A process's name, with what it runs where it is an interpreter. Flags may hold secrets."""
    try:
        process = psutil.Process(pid)
        name, words = process.name(), process.cmdline()[1:]
    except psutil.Error:
        return str(pid)
    if name.startswith("python") and words:
        program = words[1] if words[0] == "-m" and len(words) > 1 else Path(words[0]).name
        name = name if program.startswith("-") else f"{name} {program}"
    return f"{name} {pid}"


def load_before() -> Load:
    """What the machine does while nothing is measured yet."""
    watch = Watch()
    time.sleep(_BEFORE_S)
    return watch.load()


def settle(seconds: float, busy: float = 0.0) -> None:
    """Wait until servers of this process do nothing for so long; a minute at most.

    One that is idle may measure its steps again, and one whose clients have left ends their
    requests, which would disturb the next measurement of another.

    Args:
        busy: processors that other processes below this one keep busy meanwhile.
    """
    quiet_s, gives_up_s = 0.0, time.monotonic() + _LONGEST_SETTLED_S
    while quiet_s < seconds and time.monotonic() < gives_up_s:
        load = load_before()
        quiet_s = quiet_s + load.seconds if load.own <= busy + _SETTLED else 0.0


class _Reading:
    """Seconds of processor time so far.

    Attributes:
        busy_s: of the whole machine.
        own_s: of this process and all below it, including ended ones.
        others_s: of each other process; key its pid, and when it began.
    """

    def __init__(self) -> None:
        self.at_s = time.monotonic()
        # Time of guests is part of other fields.
        spent = psutil.cpu_times()._asdict()
        self.busy_s = sum(s for name, s in spent.items() if name not in (*_IDLE, *_IN_OTHERS))
        this = psutil.Process()
        below = {process.pid for process in this.children(recursive=True)}
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.own_s = ended.ru_utime + ended.ru_stime
        self.others_s: dict[tuple[int, float], float] = {}
        for process in psutil.process_iter(["cpu_times", "create_time"]):
            told = process.info
            if told["cpu_times"] is None:
                continue
            spent_s = told["cpu_times"].user + told["cpu_times"].system
            if process.pid == this.pid or process.pid in below:
                self.own_s += spent_s
            else:
                self.others_s[process.pid, told["create_time"]] = spent_s
