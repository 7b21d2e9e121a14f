"""A fork is to its parent what the command would be: its files, its status, its end by signals."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forks.process import ForkedProcess, runs
from tests.forks.start import Process, run, start

_WAITS = "tests.forks.waiting"


@pytest.fixture
def waiting() -> Iterator[Process]:
    """A program that runs."""
    reads, writes = os.pipe()
    with open(reads) as output, open(writes):
        process = start(_WAITS, stdout=writes)
        assert output.readline() == "it waits\n"
        yield process
        process.kill()
        process.wait()


def test_a_program_has_its_files_and_tells_its_status() -> None:
    done = run("json.tool", "--compact", text='{"a": 1}')
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"a":1}\n', "")
    done = run("json.tool", text="{")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Expecting property name")
    assert run("legato", "frobnicate").returncode == 2


def test_a_program_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.json").write_text("[]")
    assert run("json.tool", "in.json", "out.json").returncode == 0
    assert (tmp_path / "out.json").read_text() == "[]\n"


def test_a_traceback_is_a_failure() -> None:
    done = run("no.such.module")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_a_fork_is_a_child_of_the_tests(waiting: Process) -> None:
    assert isinstance(waiting, ForkedProcess)
    process = psutil.Process(waiting.pid)
    assert process.ppid() == os.getpid()
    assert runs(process, _WAITS)
    assert not runs(process, "json.tool")
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_it(waiting: Process, number: int) -> None:
    waiting.send_signal(number)
    assert waiting.wait(60) == waiting.returncode == -number
    waiting.kill()  # which has no effect any more


def test_an_end_that_others_have_seen_is_one(waiting: Process) -> None:
    waiting.kill()
    os.waitpid(waiting.pid, 0)
    assert waiting.wait(60) == 0


def test_a_program_that_takes_too_long_is_killed() -> None:
    before = {*psutil.Process().children()}
    with pytest.raises(subprocess.TimeoutExpired):
        run(_WAITS, timeout_s=0.01)
    assert not any(runs(child, _WAITS) for child in {*psutil.Process().children()} - before)


def test_with_another_environment_it_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries read when they are imported cannot be changed in a fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    process = start("json.tool")
    assert isinstance(process, subprocess.Popen)
    assert process.wait(60) == 1
    monkeypatch.undo()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "left by another test")
    process = start("json.tool")
    assert isinstance(process, ForkedProcess)
    assert process.wait(60) == 1
