"""A checkpoint with absurd settings is refused in one clear line, or computes numbers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.decoder import Decoder
from tests.model.conftest import TINY, SaveTiny
from tests.model.dense import packed_logits

from .test_gguf import write_gguf

PROMPT = list(range(0, 320, 40))
VALUES: list[Any] = [
    math.nan, math.inf, -math.inf, -1, 0, 1e-300, 1e30, 2**70, True, None, "x", [], [1], {},
]  # fmt: skip
NUMBERS = [value for value in VALUES if type(value) is float]
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "factor": 4.0,
        "attention_factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 32,
    },
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **WINDOWS},
}


@pytest.fixture
def tiny(save_tiny: SaveTiny) -> tuple[Path, PreTrainedModel]:
    return save_tiny(LlamaConfig(**TINY))


def outcome(path: Path) -> str:
    """The refusal, or "computes"; another exception is one too many, and so is a NaN."""
    try:
        checkpoint = open_checkpoint(ModelConfig(model=str(path)))
        model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    except UnsupportedModelError as error:
        return str(error)
    assert isinstance(model, Decoder)
    (logits,) = packed_logits(model, [PROMPT])
    assert logits.isfinite().all()
    return "computes"


def changed(folder: Path, changes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """What comes of each change to config.json."""
    path = folder / "config.json"
    contents = json.loads(path.read_text())
    for change in changes:
        path.write_text(json.dumps(contents | change))
        try:
            came = outcome(folder)
        except BaseException as error:
            raise AssertionError(f"with {change}") from error
        assert "\n" not in came, change
        yield change, came


def test_any_field(tiny: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = tiny
    names = {*json.loads((folder / "config.json").read_text()), "layer_types", "head_dim"}
    changes = [{name: value} for name in sorted(names) for value in VALUES]
    for change, came in changed(folder, changes):
        if change.keys() & {"rms_norm_eps", "max_position_embeddings", "hidden_size"}:
            assert came != "computes", change


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn", 7])
def test_a_dtype_that_nothing_is_computed_in(
    tiny: tuple[Path, PreTrainedModel], dtype: str | int
) -> None:
    [(_, came)] = changed(tiny[0], [{"dtype": dtype}])
    assert came == "computes"
    assert open_checkpoint(ModelConfig(model=str(tiny[0]))).dtype == torch.float32


@pytest.mark.parametrize("model_type", OTHERS)
def test_windows(tiny: tuple[Path, PreTrainedModel], model_type: str) -> None:
    common = {"model_type": model_type, **OTHERS[model_type]}
    names = common.keys() & {"sliding_window", "use_sliding_window", "max_window_layers"}
    changes = [common | {name: value} for name in names for value in VALUES]
    assert len([*changed(tiny[0], changes)]) == len(changes)


@pytest.mark.parametrize("rope_type", ROPE)
def test_rope(tiny: tuple[Path, PreTrainedModel], rope_type: str) -> None:
    whole = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type]}
    assert [came for _, came in changed(tiny[0], [{"rope_parameters": whole}])] == ["computes"]
    wrong = [whole | {name: value} for name in whole for value in VALUES]
    if rope_type == "longrope":
        wrong += [whole | dict.fromkeys(("short_factor", "long_factor"), [v] * 8) for v in VALUES]
    for change, came in changed(tiny[0], [{"rope_parameters": parameters} for parameters in wrong]):
        if change["rope_parameters"]["rope_theta"] != 10000.0:
            assert came != "computes", change


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_theta": math.nan}, "rope_theta is nan: Expected `float` > 1.0"),
        ({"rope_theta": 1e30}, "rope_theta is 1e+30"),
        ({"factor": -2.0}, "factor is -2.0"),
        ({"beta_fast": 1.0, "beta_slow": 32.0}, "beta_slow is 32.0, but beta_fast is 1.0"),
        ({"attention_factor": math.inf}, "attention_factor is inf"),
        ({"mscale": math.nan}, "mscale is nan"),
    ],
)
def test_the_parameter_to_blame_is_named(
    tiny: tuple[Path, PreTrainedModel], parameters: dict[str, float], message: str
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, **ROPE["yarn"], **parameters}
    [(_, came)] = changed(tiny[0], [{"rope_parameters": yarn}])
    assert message in came


GGUF_FIELDS = (
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "context_length",
    "attention.sliding_window", "rope.scaling.original_context_length",
)  # fmt: skip


def test_gguf_metadata(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for name in GGUF_FIELDS:
        for value in [*NUMBERS, 0, 2**32 - 1]:
            extra = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, name: value}
            write_gguf(path, "llama", tiny[1], **extra)
            came = outcome(path)
            if name in GGUF_FIELDS[:3] and value != 2**32 - 1:
                assert came != "computes", f"{name} {value}"
