"""Groups of files that one worker runs, and workers that die."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution import TOGETHER, FilesTogether

ROOT = Path(__file__).parents[1]


def test_each_file_is_there_and_in_one_group() -> None:
    files = [file for group in TOGETHER.values() for file in group]
    assert len(files) == len(set(files))
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_a_group_is_one_workers_and_so_is_any_other_file() -> None:
    def scope(nodeid: str) -> str:
        return FilesTogether._split_scope(FilesTogether.__new__(FilesTogether), nodeid)

    for files in TOGETHER.values():
        assert len({scope(f"{file}::test_it[a::b]") for file in files}) == 1
    other = "tests/test_floors.py"
    assert scope(f"{other}::test_it") == other


@pytest.mark.parametrize("num_tests", [1, 3])
@pytest.mark.parametrize("dying_file", [0, 7])
def test_a_run_ends_though_a_worker_dies(tmp_path: Path, num_tests: int, dying_file: int) -> None:
    """The test it died in has failed, and is not run again; each other one is run once."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler"
    )
    for number in range(8):
        tests = [f"def test_{test}(): pass\n" for test in range(num_tests)]
        if number == dying_file:
            tests.insert(num_tests // 2, "def test_dies(): os.kill(os.getpid(), 9)\n")
        (tmp_path / f"test_{number}.py").write_text("import os\n" + "".join(tests))
    command = (
        "pytest -q -p xdist.plugin -n 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider"
    )
    # Other plugins take six times as long to import as all of the run.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert f"test_{dying_file}.py::test_dies" in done.stdout
    assert f"1 failed, {8 * num_tests} passed" in done.stdout
