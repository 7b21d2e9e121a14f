"""Kernels that compute wrong numbers on this machine are found at the start, and not used."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from legato.core.config import EngineConfig, Kernels
from legato.core.errors import ConfigError
from legato.engine.build.builder import build_engine
from legato.executor import kernel_check
from legato.model.native_kernels import native_instructions
from legato.model.native_operators import NativeLinear
from tests.checkpoint.test_dummy import described
from tests.executor.checked import checked_again  # noqa: F401
from tests.model.conftest import TINY

pytestmark = pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")


SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
"""That native layers know."""


def config(folder: Path, kernels: Kernels) -> EngineConfig:
    return EngineConfig.of(
        model=str(described(folder / "model", LlamaConfig(**(TINY | SIZES)))),
        load_format="dummy",
        dtype="bfloat16",
        kernels=kernels,
        kv_cache_memory_bytes=2**22,
    )


@pytest.fixture
def _wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for the best set of instructions, in the check's products alone."""

    class WrongLinear(NativeLinear):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            return -super().__call__(rows) if self._is_wrong else super().__call__(rows)

        def __init__(self, weight: torch.Tensor, kernels: kernel_check.NativeKernels) -> None:
            super().__init__(weight, kernels)
            self._is_wrong = kernels.instructions == native_instructions()[0]

    monkeypatch.setattr(kernel_check, "NativeLinear", WrongLinear)


@pytest.mark.usefixtures("checked_again", "_wrong_kernels")
def test_the_next_best_kernels_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong, *others = native_instructions()
    with caplog.at_level(logging.ERROR):
        _, info = build_engine(config(tmp_path, "auto"))
    assert info.settings["kernels"] == (others[0] if others else "torch")
    assert list(info.rejected_kernels) == [wrong]
    assert "products of 1 rows" in info.rejected_kernels[wrong]
    assert f"WRONG KERNELS: those for {wrong}" in caplog.text


@pytest.mark.usefixtures("checked_again", "_wrong_kernels")
def test_an_engine_does_not_start_on_wrong_kernels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wrong numbers"):
        build_engine(config(tmp_path, native_instructions()[0]))


def test_sound_kernels_are_used(tmp_path: Path) -> None:
    _, info = build_engine(config(tmp_path, "auto"))
    assert info.settings["kernels"] == native_instructions()[0]
    assert not info.rejected_kernels
