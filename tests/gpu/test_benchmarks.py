"""Parts of `benchmarks.gpu` that only kernels of a GPU run, in the interpreter."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu.figures import Report
from benchmarks.gpu.parts import attention, experts, fp8, products, sampling, steps
from benchmarks.gpu.settings import LLAMA_3_1_8B, Settings, Sizes

from legato.checkpoint.loader import open_checkpoint
from legato.core.errors import ConfigError
from legato.model.decoder import Decoder
from tests.gpu.executors import make_executor

TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "dtype": "float32",
}
_IN_CODES = "Legato, 4 bits"
SIZES = Sizes(
    streams=(2,),
    context=12,
    decoded=2,
    prompt=36,  # of two blocks
    chunks=(36,),
    mixed=(9,),
    mixed_streams=2,
    mixed_start=16,
    max_model_len=64,
    matrix=32,
    vector_bytes=2**10,
)


@pytest.fixture
def settings(tmp_path: Path, device: torch.device) -> Settings:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B | TINY))
    return Settings(model=str(tmp_path), out=str(tmp_path), device=device.type, sizes=SIZES)


def test_attention_is_compared_with_pytorchs(settings: Settings) -> None:
    report = Report(attention.TITLE)
    attention.run(settings, report)
    figures = report.figures()
    names = [row.name for row in figures.rows]
    assert len(names) == 8
    assert len(set(names)) == 8
    assert names[:2] == ["Legato: 2 decodes at 12", "PyTorch: 2 decodes at 12"]
    assert all(row.value > 0 and row.least for row in figures.rows)


def test_experts_are_compared_with_pytorchs(settings: Settings) -> None:
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    (Path(settings.model) / "config.json").write_text(json.dumps(LLAMA_3_1_8B | TINY | mixture))
    report = Report(experts.TITLE)
    experts.run(settings, report)
    figures = report.figures()
    assert [row.name for row in figures.rows] == [
        f"{way}: {count} rows" for count in (2, 36) for way in ("Legato", "PyTorch", _IN_CODES)
    ]
    assert all(row.value > 0 and row.least for row in figures.rows)
    assert "3 experts, 2 a row, of 64 x 32" in figures.notes[0]


@pytest.mark.parametrize(("part", "num_rows"), [(products, 6), (sampling, 8)], ids=str)
def test_kernels_are_measured_alone(part: Any, num_rows: int, settings: Settings) -> None:
    report = Report(part.TITLE)
    part.run(settings, report)
    figures = report.figures()
    assert len(figures.rows) >= num_rows
    assert all(row.value > 0 and row.least for row in figures.rows)


def test_steps_run_two_at_a_time(settings: Settings) -> None:
    checkpoint = open_checkpoint(settings.engine().model)
    plain = Decoder(checkpoint.spec, dtype=torch.float32, device=settings.torch_device)
    plain.load_weights(checkpoint.tensors(settings.torch_device))
    executor, _ = make_executor(plain, block_size=16, num_blocks=12, depth=2)
    runtime: Any = SimpleNamespace(
        executor=executor,
        kv=SimpleNamespace(block_size=16, num_blocks=12, group_sizes=(12,)),
        spec=plain.spec,
        model=plain,
        cache=plain.cache,
    )
    report = Report(steps.TITLE)
    steps.of_runtime(settings, runtime, report)
    figures = report.figures()
    assert len(figures.rows) == 5
    assert all(row.value > 0 and row.least for row in figures.rows)


def test_a_gpu_without_8_bit_floats_is_left_out(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("too old")

    monkeypatch.setattr(fp8, "check_fp8", refuse)
    report = Report(fp8.TITLE)
    fp8.run(settings, report)
    assert report.figures().notes == ["Not here: too old."]
    assert not report.figures().rows
