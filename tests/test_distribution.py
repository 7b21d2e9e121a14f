"""Groups of files that one worker runs."""

from pathlib import Path

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
