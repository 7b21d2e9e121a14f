from collections.abc import Mapping, Sequence

import pytest

from legato.engine.process import child_process
from tests.forks.start import Process, start


@pytest.fixture
def forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes are forks, which saves their imports."""

    def started(program: Sequence[str], fd: int, environment: Mapping[str, str]) -> Process:
        del environment  # the tests have these variables
        return start(*program[2:], str(fd), stdout=1, pass_fds=[fd])

    monkeypatch.setattr(child_process, "_started", started)
