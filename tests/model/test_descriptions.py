"""Configurations are read as transformers reads them, which the engine does without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from legato.model.architectures import ARCHITECTURES, described
from legato.model.description import keys_of
from legato.model.latent_architectures import LATENT_ARCHITECTURES
from legato.model.rope import RopeFrequencies

from ..profiles import examples

SIZES = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
OPTIONAL: dict[str, Any] = {
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([16, 32]),
    "max_position_embeddings": st.integers(2, 10**6),
    "rms_norm_eps": st.floats(1e-9, 1e-2),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "use_sliding_window": st.booleans(),
    "sliding_window": st.none() | st.integers(1, 5000),
    "max_window_layers": st.integers(0, 4),
    "rope_theta": st.floats(2, 1e7) | st.integers(2, 10**7),
}
NOT_DEFAULT = {
    "Qwen3_5ForCausalLM": {"num_hidden_layers": 4},
    "Qwen3_5MoeForCausalLM": {"num_hidden_layers": 4},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
}
"""Key an architecture whose defaults do not run, value fields of a model that does."""
PLAIN = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
"""Architectures that read all of these fields."""
FACTOR = {"factor": st.floats(1, 64)}
# Key the type, value its required parameters and its optional ones.
ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": (FACTOR, {}),
    "llama3": (
        {**FACTOR, "low_freq_factor": st.floats(0.5, 2), "high_freq_factor": st.floats(3, 9)},
        {},
    ),
    "yarn": (
        FACTOR,
        {
            "truncate": st.booleans(),
            "beta_fast": st.none() | st.integers(20, 40),
            "mscale": st.none() | st.floats(0, 2),
            "mscale_all_dim": st.floats(0, 2),
            "attention_factor": st.none() | st.floats(0.5, 2),
        },
    ),
    "longrope": ({}, {**FACTOR, "attention_factor": st.none() | st.floats(0.5, 2)}),
}


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """config.json as one of its authors may have left it, old spellings included."""
    name = draw(st.sampled_from(PLAIN))
    contents = SIZES | {"architectures": [name], "model_type": ARCHITECTURES[name].model_type}
    contents |= draw(st.fixed_dictionaries({}, optional=OPTIONAL))
    if draw(st.booleans()):
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        num_layers = contents["num_hidden_layers"]
        contents["layer_types"] = draw(st.lists(kinds, min_size=num_layers, max_size=num_layers))
    if draw(st.booleans()):
        # transformers fails on YaRN where heads have no size of their own.
        head_dim = contents.setdefault("head_dim", 32)
        rope_type = draw(st.sampled_from(sorted(ROPE)))
        needed, optional = ROPE[rope_type]
        rope = draw(st.fixed_dictionaries(needed, optional=optional))
        if rope_type == "longrope":
            size = head_dim // 2
            factors = draw(st.lists(st.floats(1, 9), min_size=size, max_size=size))
            rope |= {"short_factor": factors, "long_factor": factors}
        if draw(st.booleans()):
            rope["original_max_position_embeddings"] = draw(st.integers(8, 2000))
        spelling = draw(st.sampled_from(["rope_parameters", "rope_scaling"]))
        contents[spelling] = rope | {draw(st.sampled_from(["rope_type", "type"])): rope_type}
    return contents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("described")


@examples(150)
@given(contents=configurations())
def test_as_transformers_reads_it(folder: Path, contents: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(contents))
    theirs = AutoConfig.from_pretrained(folder)
    found, ours = described(contents)
    same = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads")
    for name in {*same, "attention_bias", "mlp_bias"} & keys_of(type(found)).keys():
        value = getattr(found, name)
        assert (ours.num_heads if value is None else value) == getattr(theirs, name, value), name
    size = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or size)
    assert ours.windows == windows(theirs)
    assert ours.ropes == (rope(theirs, ours.head_dim),)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_an_empty_rope_beside_another_spelling_is_none(spelling: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    [empty] = {"rope_parameters", "rope_scaling"} - {spelling}
    contents = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    _, alone = described({**contents, spelling: yarn})
    assert described({**contents, spelling: yarn, empty: {}})[1] == alone
    assert alone.ropes != described(contents)[1].ropes


@pytest.mark.parametrize(
    "name",
    sorted(set(ARCHITECTURES) - set(LATENT_ARCHITECTURES) - {"GraniteMoeHybridForCausalLM"}),
)
def test_missing_fields_have_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    """`GraniteMoeHybrid` is a model with recurrent layers by default.

    Those of latent attention are in tests/families/test_latent.py.
    """
    kind = ARCHITECTURES[name].model_type
    contents = SIZES | {"architectures": [name], "model_type": kind} | NOT_DEFAULT.get(name, {})
    (tmp_path / "config.json").write_text(json.dumps(contents))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.allow_global_per_layer_attribute_access = True
    _, ours = described(contents)
    num_heads = theirs.num_attention_heads
    assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", num_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // num_heads)
    eps = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
    assert ours.norm_eps == next(getattr(theirs, name) for name in eps if hasattr(theirs, name))
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    default = "sliding_attention" if theirs.model_type == "mistral" else "full_attention"
    types = getattr(theirs, "layer_types", None) or [default] * len(ours.layers)
    types = ["full_attention" if kind == "hybrid" else kind for kind in types]
    own = ("full_attention", "sliding_attention", "chunked_attention")
    has_attention = [kind.endswith(own) for kind in types]
    assert [layer.attention is not None for layer in ours.layers] == has_attention
    attentions = [kind for kind, attends in zip(types, has_attention, strict=True) if attends]
    assert [window is None for window in ours.windows] == [kind[0] == "f" for kind in attentions]
    thetas = getattr(theirs, "rope_parameters", None)
    if thetas is None:
        assert all(not any(rope.inverse) for rope in ours.ropes)
        return
    by_kind = thetas if "full_attention" in thetas else {"full_attention": thetas}
    for parameters in (by_kind[kind] for kind in set(types) & set(by_kind)):
        fastest_but_one = parameters["rope_theta"] ** (-2 / 16)
        if parameters["rope_type"] == "default" and "partial_rotary_factor" not in parameters:
            assert any(
                rope.inverse[1] == pytest.approx(fastest_but_one ** (16 / ours.head_dim))
                for rope in ours.ropes
            )


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    default = "sliding" if config.model_type == "mistral" else "full"
    types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    if config.model_type == "llama":
        types = [default] * config.num_hidden_layers
    return tuple(config.sliding_window if kind.startswith("sliding") else None for kind in types)


def rope(config: PreTrainedConfig, head_dim: int) -> RopeFrequencies:
    parameters = config.rope_parameters
    if parameters["rope_type"] != "default":
        angles, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    else:
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        angles, scaling = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    return RopeFrequencies(tuple(angles.tolist()), scaling)
