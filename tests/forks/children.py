"""The processes that a forked program of Legato starts are forks of it, too."""

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from legato.engine.build.ranks import processes as rank_processes
from legato.engine.process import child_process
from legato.engine.process.engine_process import SHORT_SPIN
from legato_lab.load import local_server
from tests.forks.process import ForkedProcess, run_program


def fork_children() -> None:
    """From now on, fork this process where it would start a program of Legato."""
    child_process._started = _forked  # type: ignore[assignment]
    rank_processes._started = _forked_rank  # type: ignore[assignment]


def _forked_rank(fd: int) -> ForkedProcess:
    return _forked(rank_processes._PROGRAM, fd, SHORT_SPIN)


def fork_servers() -> None:
    """From now on, fork this process where a command would start a server."""
    local_server._started = _forked_server  # type: ignore[assignment]


def _forked(program: Sequence[str], fd: int, environment: Mapping[str, str]) -> ForkedProcess:
    return _fork([*program, str(fd)], lambda: _keep(fd), environment)


def _forked_server(command: Sequence[str], log: IO[str] | int) -> ForkedProcess:
    def prepare() -> None:
        os.setsid()
        with open(os.devnull, "r+") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno() if isinstance(log, int) else log.fileno(), 2)
        _keep(2)

    return _fork(command, prepare, {})


def _fork(
    command: Sequence[str], prepare: Callable[[], None], environment: Mapping[str, str]
) -> ForkedProcess:
    assert tuple(command[:2]) == (sys.executable, "-m")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _run(command[2:], prepare, environment)
    return ForkedProcess(pid, command[2:])


def _keep(fd: int) -> None:
    """Close all files but the standard ones and this one."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, fd)
    os.closerange(fd + 1, most_files)


def _run(
    arguments: Sequence[str], prepare: Callable[[], None], environment: Mapping[str, str]
) -> None:
    status = 1
    try:
        gc.freeze()  # so that no socket of the parent's is collected, and closes another file
        signal.set_wakeup_fd(-1)
        prepare()
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
