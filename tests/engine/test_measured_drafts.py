"""Whether a start measures drafts, and whose measurements it takes for its own."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from legato.core.config import EngineConfig, Speculative
from legato.engine.build.builder import load_runtime
from legato.engine.calibration import calibration
from legato.engine.calibration.step_times import StepTimes
from tests.checkpoint.test_dummy import described
from tests.model.conftest import TINY

_KINDS: tuple[Speculative, ...] = ("auto", 4, "off")


def step_times(folder: Path, speculative: Speculative) -> StepTimes:
    model = described(folder / "model", LlamaConfig(**TINY))
    config = EngineConfig.of(
        model=str(model),
        load_format="dummy",
        max_num_seqs=8,
        kv_cache_memory_bytes=2**22,
        calibration_dir=str(folder),
        speculative=speculative,
    )
    return load_runtime(config).step_times


def test_drafts_are_measured_where_there_may_be_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a model whose steps take a millisecond or so."""
    monkeypatch.setattr(calibration, "CALIBRATION_S", 2.0)
    monkeypatch.setattr(calibration, "_FILL_S", 0.5)
    drafting = [s for s, _ in step_times(tmp_path, "auto").calibration().run(lambda _: None)]
    assert any(shape.num_draft_rows for shape in drafting)
    assert not all(shape.num_draft_rows for shape in drafting if shape.num_decode_rows)
    plain = [s for s, _ in step_times(tmp_path, "off").calibration().run(lambda _: None)]
    assert not any(shape.num_draft_rows for shape in plain)


def test_what_was_measured_without_drafts_is_not_taken_for_all(tmp_path: Path) -> None:
    found = {kind: step_times(tmp_path, kind).file for kind in _KINDS}
    assert found["auto"].path == found[4].path != found["off"].path
    # Files of versions that measured none lack it, and are not taken for either.
    assert "drafts" in found["off"].about
