"""The processes that a forked server or engine starts are forks of it, too."""

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence

from legato.engine.build.ranks import processes as rank_processes
from legato.engine.process import child_process
from legato.engine.process.engine_process import SHORT_SPIN
from tests.forks.process import ForkedProcess, run_program


def fork_children() -> None:
    """From now on, fork this process where it would start a program of Legato."""
    child_process._started = _forked  # type: ignore[assignment]
    rank_processes._started = _forked_rank  # type: ignore[assignment]


def _forked_rank(fd: int) -> ForkedProcess:
    return _forked(rank_processes._PROGRAM, fd, SHORT_SPIN)


def _forked(program: Sequence[str], fd: int, environment: Mapping[str, str]) -> ForkedProcess:
    assert program[:2] == (sys.executable, "-m")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _run([*program[2:], str(fd)], fd, environment)
    return ForkedProcess(pid)


def _run(arguments: Sequence[str], fd: int, environment: Mapping[str, str]) -> None:
    status = 1
    try:
        gc.freeze()  # so that no socket of the parent's is collected, and closes another file
        signal.set_wakeup_fd(-1)
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.closerange(3, fd)
        os.closerange(fd + 1, most_files)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        run_program(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
