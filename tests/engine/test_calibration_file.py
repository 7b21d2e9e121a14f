"""Measurements on disk: found again by the same key, and by no other."""

import errno
import fcntl
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import ConfigError
from legato.engine.calibration.calibration_file import (
    CalibrationFile,
    Measurements,
    read_measurements,
    shape_counts,
    write_profile,
)
from legato.scheduler.margin import Margin, Tails
from tests.scheduler.step_times import step_shape

KEY = {"model": "a", "threads": "2"}
STEPS = [
    (step_shape(num_decodes=3, context=100, chunk=50, start=7, samples=True), 0.125),
    (step_shape(chunk=1), 0.0625),
]


def measurements(about: dict[str, str] = KEY) -> Measurements:
    steps = [(shape_counts(shape), seconds) for shape, seconds in STEPS]
    return Measurements(figures="measured", about=about, steps=steps, max_model_len=100)


def told(steps: list) -> list:  # type: ignore[type-arg]
    return [([getattr(s, name) for name in s.__slots__], seconds) for s, seconds in steps]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    assert CalibrationFile(str(folder), KEY).load() is None
    CalibrationFile(str(folder), KEY).save(measurements())
    loaded = CalibrationFile(str(folder), dict(reversed(KEY.items()))).load()
    assert loaded is not None
    assert told(loaded.measured_steps) == told(STEPS)
    assert loaded.tails is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_what_was_learned_in_service_is_kept_beside_the_steps(tmp_path: Path) -> None:
    tails = Tails(body=(0.01, -0.02), watched_s=40.0, interruptions_s=(0.03,))
    file = CalibrationFile(str(tmp_path), KEY)
    file.save(msgspec.structs.replace(measurements(), tails=tails))
    loaded = file.load()
    assert loaded is not None
    assert loaded.tails == tails
    assert told(loaded.measured_steps) == told(STEPS)


@pytest.mark.parametrize("change", [{"threads": "4"}, {"model": "b"}, {"more": "1"}])
def test_another_machine_has_another_file(tmp_path: Path, change: dict[str, str]) -> None:
    CalibrationFile(str(tmp_path), KEY).save(measurements())
    assert CalibrationFile(str(tmp_path), KEY | change).load() is None


def test_a_file_of_another_key_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    CalibrationFile(str(tmp_path), {"model": "b"}).save(measurements({"model": "b"}))
    mine = CalibrationFile(str(tmp_path), KEY)
    next(tmp_path.iterdir()).rename(mine.path)
    assert mine.load() is None


def test_two_engines_that_write_at_once_lose_no_new_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends and keeps its tails while the other keeps another calibration."""
    ending, measuring = CalibrationFile(str(tmp_path), KEY), CalibrationFile(str(tmp_path), KEY)
    ending.save(measurements())
    new = msgspec.structs.replace(measurements(), max_model_len=200)
    writer = threading.Thread(target=measuring.save, args=[new])

    def load() -> Measurements | None:
        found = CalibrationFile.load(measuring)
        writer.start()
        writer.join(0.1)  # it waits for the lock
        return found

    monkeypatch.setattr(ending, "load", load)
    ending.keep_tails(Tails(watched_s=40.0))
    writer.join()
    assert measuring.load() == new
    measuring.keep_tails(Tails(watched_s=30.0))
    assert measuring.load() == msgspec.structs.replace(new, tails=Tails(watched_s=30.0))
    measuring.remove(measurements({"model": "b"}))
    assert measuring.load() is None, "the steps are the same"


def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    file = CalibrationFile(str(tmp_path), KEY)
    file.save(measurements())
    file.keep_tails(Tails(watched_s=40.0))
    loaded = file.load()
    assert loaded is not None
    assert loaded.tails == Tails(watched_s=40.0)


def test_a_stopped_engine_does_not_keep_others_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.engine.calibration.calibration_file._LOCK_WAIT_S", 0.0)
    file = CalibrationFile(str(tmp_path), KEY)
    with file._locked():
        CalibrationFile(str(tmp_path), KEY).save(measurements())
    assert file.load() is not None


def test_a_file_is_on_disk_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def fsync_noted(handle: int) -> None:
        events.append("fsync")
        fsync(handle)

    def replace_noted(path: Path, to: Path) -> None:
        events.append("replace")
        replace(path, to)

    monkeypatch.setattr(os, "fsync", fsync_noted)
    monkeypatch.setattr(Path, "replace", replace_noted)
    file = CalibrationFile(str(tmp_path), KEY)
    file.save(measurements())
    assert events == ["fsync", "replace"]
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1, "others may read it as they may any file"


def test_a_save_that_fails_or_is_killed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = CalibrationFile(str(tmp_path), KEY)
    killed, writing = (tmp_path / f".{file.path.name}.{name}" for name in ("0a1b", "2c3d"))
    for path in (killed, writing):
        path.write_text("{")
    os.utime(killed, (1, 1))
    file.save(measurements())
    assert {*tmp_path.iterdir()} == {file.path, writing}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file.save(msgspec.structs.replace(measurements(), max_model_len=5))
    assert "no space left" in caplog.text
    assert {*tmp_path.iterdir()} == {file.path, writing}
    assert file.load() == measurements()


BROKEN = {
    "empty": b"",
    "cut off": b'{"about": {}, "steps": [[{"num_sam',
    "not text": b"\xff\xfe\x00",
    "another format": b'{"about": {}, "steps": [{"seconds": 1.0}]}',
    "no time": b'{"about": {}, "steps": [[{"num_samples": 3.0}, 0.0]]}',
    "number that is none": b'{"tails": {"body": [0.1, null]}}',
    "number out of range": b'{"tails": {"body": [1e999]}}',
    "deep": b'{"about": {}, "steps": ' + b"[" * 10**5,
    "unknown count": b'{"about": {}, "steps": [[{"num_wheels": 3.0}, 1.0]]}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_measured_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = CalibrationFile(str(tmp_path), KEY)
    file.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.load() is None
    assert str(file.path) in caplog.text
    with pytest.raises(ConfigError, match="as a profile"):
        read_measurements(file.path, Measurements)
    file.save(measurements())
    assert file.load() is not None


def test_the_cache_of_an_earlier_version_is_measured_anew(tmp_path: Path) -> None:
    file = CalibrationFile(str(tmp_path), KEY)
    file.path.write_bytes(b'{"key": {"model": "a", "threads": "2"}, "steps": []}')
    assert file.load() is None


def test_a_folder_that_cannot_be_made_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        CalibrationFile(str(tmp_path / "file" / "folder"), KEY).save(measurements())
    assert "not kept" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"tails": Tails(body=(0.1, math.inf))},
        {"tails": Tails(watched_s=math.nan)},
        {"tails": Tails(interruptions_s=(-math.inf,))},
        {"steps": [({"num_samples": 1.0}, math.inf)]},
        {"steps": [({"num_samples": math.nan}, 1.0)]},
        {"steps": [({"num_samples": 1.0}, 0.0)]},
    ],
)
def test_measurements_that_could_not_be_read_leave_the_file_as_it_was(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = CalibrationFile(str(tmp_path), KEY)
    file.save(measurements())
    before = file.path.read_bytes()
    with caplog.at_level(logging.WARNING):
        file.save(msgspec.structs.replace(measurements(), **changes))
    assert "the calibration is not kept" in caplog.text
    assert file.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]
    with pytest.raises(ConfigError, match="as a profile"):
        write_profile(tmp_path / "x.json", msgspec.structs.replace(measurements(), **changes))


@given(st.lists(st.tuples(*[st.floats(1e-6, 1e3)] * 2, st.none() | st.floats(1e-6, 1e3))))
def test_what_a_margin_remembers_can_always_be_kept(
    steps: list[tuple[float, float, float | None]],
) -> None:
    margin = Margin()
    for predicted_s, taken_s, limit_s in steps:
        margin.observe(predicted_s, taken_s, limit_s, is_mixed=True)
    assert math.isfinite(margin.body_factor)
    encoded = msgspec.json.encode(margin.tails)
    assert msgspec.json.decode(encoded, type=Tails) == margin.tails


def test_old_files_go(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("notes.json", "0123456789abcdef.txt")]
    for other in others:
        other.write_text("{}")
    for index in range(70):
        path = tmp_path / f"{index:016x}.json"
        path.write_text("{}")
        os.utime(path, (index, index))
    CalibrationFile(str(tmp_path), KEY).save(measurements())
    left = sorted(path.name for path in tmp_path.iterdir() if path not in others)
    assert len(left) == 64
    assert CalibrationFile(str(tmp_path), KEY).path.name in left
    assert f"{6:016x}.json" not in left
    assert all(other.exists() for other in others)


def test_a_file_that_is_used_stays(tmp_path: Path) -> None:
    used = CalibrationFile(str(tmp_path), KEY)
    used.save(measurements())
    os.utime(used.path, (1, 1))
    assert used.load() is not None
    for index in range(70):
        path = tmp_path / f"{index:016x}.json"
        path.write_text("{}")
        os.utime(path, (2 + index, 2 + index))
    other = KEY | {"model": "b"}
    CalibrationFile(str(tmp_path), other).save(measurements(other))
    assert used.path.exists()


def test_two_engines_may_remove_files_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(70):
        (tmp_path / f"{index:016x}.json").write_text("{}")
    listed = Path.iterdir

    def also_removed(folder: Path) -> Any:
        for path in listed(folder):
            if path.name == f"{3:016x}.json":
                path.unlink()
            yield path

    monkeypatch.setattr(Path, "iterdir", also_removed)
    file = CalibrationFile(str(tmp_path), KEY)
    file.save(measurements())
    assert not caplog.records
    assert len(list(listed(tmp_path))) == 64
    assert file.path.exists()
