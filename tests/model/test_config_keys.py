"""Every key of a config.json is read, or without effect for a reason, or reported by name."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model import config_keys, families
from legato.model.architectures import ARCHITECTURES, described
from legato.model.config_keys import key_use
from legato.model.description import SPELLINGS, keys_of
from legato.model.wrappers import part_of
from tests.families import (
    test_expert_layouts,
    test_hub_layouts,
    test_latent,
    test_recurrent_layouts,
)
from tests.families.layouts import Layout
from tests.families.tiny import MODELS, random_model

from ..profiles import examples

BY_TYPE = {known.model_type: name for name, known in ARCHITECTURES.items()}
LAYOUTS: dict[str, Layout] = {
    **test_hub_layouts.LAYOUTS,
    **test_recurrent_layouts.LAYOUTS,
    **test_expert_layouts.LAYOUTS,
    **test_latent.LAYOUTS,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def saved_config(name: str) -> dict[str, Any]:
    """The whole config.json of a tiny model, as transformers writes it."""
    tiny = MODELS[name]
    contents = tiny.config().to_dict() | {
        "architectures": [BY_TYPE[tiny.model_type]],
        "dtype": "float32",
    }
    read: dict[str, Any] = json.loads(json.dumps(contents, default=str))
    return read


CONFIGS = {
    **{name: saved_config(name) for name in MODELS},
    **{f"{name}, hub": own.config(saved_config(own.model)) for name, own in LAYOUTS.items()},
}
NAMES = st.sampled_from(sorted(CONFIGS))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_accounted_for(name: str) -> None:
    config = CONFIGS[name]
    use = key_use(config)
    assert use.unread == ()
    found = {*use.used, *use.without_effect, *use.unread}
    parts = {key for key in found if "." in key}
    assert found - parts == config.keys()
    if part := part_of(config):
        own = {f"{part}.{key}" for key in config[part]}
        assert own <= parts
    assert all(use.without_effect.values())
    assert not {*use.used} & {*use.without_effect}
    assert not {*use.defaulted} & {*use.used}


UNKNOWN = st.from_regex(r"[a-z]{1,9}_[a-z]{1,9}_of_no_family", fullmatch=True)
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just({"a": 1})


@examples(150)
@given(name=NAMES, key=UNKNOWN, value=VALUES)
def test_an_unknown_key_is_reported(name: str, key: str, value: object) -> None:
    config = CONFIGS[name]
    before = key_use(config)
    unread = (key, *before.unread)
    assert key_use({**config, key: value}) == msgspec.structs.replace(before, unread=unread)
    if part := part_of(config):
        unread = (*before.unread, f"{part}.{key}")
        assert key_use({**config, part: {**config[part], key: value}}).unread == unread


@examples(50)
@given(name=st.sampled_from(sorted(MODELS)), key=UNKNOWN)
def test_an_unknown_rope_parameter_is_reported(name: str, key: str) -> None:
    config = CONFIGS[name]
    if "rope_parameters" not in config:
        return
    rope = dict(config["rope_parameters"])
    nested = next((kind for kind, own in rope.items() if isinstance(own, dict)), None)
    if nested is None:
        expected, rope[key] = f"rope_parameters.{key}", 1.0
    else:
        expected, rope[nested] = f"rope_parameters.{nested}.{key}", {**rope[nested], key: 1.0}
    assert key_use({**config, "rope_parameters": rope}).unread == (expected,)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("llama", {"alibi": True}),
        ("llama", {"sliding_window": 512}),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("olmo2", {"mlp_bias": True}),
        ("deepseek-v3", {"topk_method": "greedy"}),
        ("deepseek-v3", {"moe_layer_freq": 2}),
        ("qwen3.5", {"attn_output_gate": False}),
        ("hunyuan-moe", {"num_shared_expert": [1, 2]}),
        ("minimax-m2", {"shared_intermediate_size": 64}),
        ("llama", {"text_config": {}}),
    ],
)
def test_a_key_with_another_value_than_usual_is_reported(
    model: str, change: dict[str, Any]
) -> None:
    assert key_use(CONFIGS[model] | change).unread == (*change,)


def test_keys_of_a_part_and_of_the_file_are_told_apart() -> None:
    whole = CONFIGS["gemma-3-4b, hub"]
    assert {"text_config.eos_token_id", "text_config.hidden_size"} <= {*key_use(whole).used}
    given_twice = key_use(whole | {"eos_token_id": 2, "hidden_size": 7})
    assert "text_config.eos_token_id" in given_twice.without_effect
    assert "hidden_size" in given_twice.without_effect
    assert "text_config.hidden_size" in given_twice.used


def test_a_key_that_the_family_does_not_name_cannot_be_read() -> None:
    description, _ = described(CONFIGS["llama"])
    with pytest.raises(AttributeError, match=r"Llama does not name 'sliding_window'"):
        description.sliding_window  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match="Llama does not name sliding_window"):
        description.replace(sliding_window=3)
    with pytest.raises(AttributeError, match=r"Llama names none of .*num_experts_per_tok"):
        description.spelled("active_experts")


def test_a_missing_or_wrong_key_is_named() -> None:
    config = CONFIGS["llama"]
    lacking = {key: value for key, value in config.items() if key != "hidden_size"}
    with pytest.raises(msgspec.ValidationError, match="missing required field `hidden_size`"):
        described(lacking)
    with pytest.raises(msgspec.ValidationError, match=r"`int`, got `str` - at `\$.hidden_size`"):
        described(config | {"hidden_size": "64"})
    with pytest.raises(msgspec.ValidationError, match=r"at `\$.layer_types\[0\]`"):
        described(CONFIGS["mistral"] | {"layer_types": [3]})


def variants(config: dict[str, Any], keys: set[str]) -> Iterator[dict[str, Any]]:
    """A config, and others without a key, or with none, 1 or the other value of a switch."""
    yield config
    yield config | {"rope_parameters": YARN}
    for key in keys:
        yield {name: value for name, value in config.items() if name != key}
        yield from (config | {key: value} for value in (None, 1, not config.get(key)))
    yield {key: value for key, value in config.items() if "layer" not in key} | {
        "num_hidden_layers": 4
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_family_reads_what_it_names(name: str) -> None:
    architecture = ARCHITECTURES[name]
    named = architecture.keys
    read: set[str] = set()

    def recorded(self: object, key: str) -> Any:
        read.add(key)
        return object.__getattribute__(self, key)

    recording = type(named.__name__, (named,), {"__getattribute__": recorded})
    for tiny in (own for own in MODELS if BY_TYPE[MODELS[own].model_type] == name):
        missing = keys_of(named).keys() - read
        for config in variants(CONFIGS[tiny], missing):
            with suppress(ValueError, UnsupportedModelError, TypeError, ArithmeticError):
                architecture.spec(recording({**architecture.defaults, **config}))
    assert keys_of(named).keys() - read == {"dtype", "torch_dtype"}  # the checkpoint reads them


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tables_of_a_family_name_its_keys(name: str) -> None:
    architecture = ARCHITECTURES[name]
    named = keys_of(architecture.keys).keys()
    assert architecture.defaults.keys() <= named
    assert not architecture.implied.keys() & named


def test_no_family_reads_a_key_that_is_listed_as_without_effect() -> None:
    lists = (keys.split() for keys in config_keys._WITHOUT_EFFECT.values())
    listed = [key for keys in lists for key in keys]
    assert len(listed) == len(set(listed))
    for architecture in ARCHITECTURES.values():
        assert not {*listed} & keys_of(architecture.keys).keys()


def test_one_spelling_means_one_thing() -> None:
    spellings = [name for names in SPELLINGS.values() for name in names]
    assert len(spellings) == len(set(spellings))
    named = {key for known in ARCHITECTURES.values() for key in keys_of(known.keys)}
    assert {*spellings} <= named


@pytest.mark.parametrize(
    ("model", "noun", "older", "newer"),
    [
        ("nemotron-3", "norm_eps", {"rms_norm_eps": 0.5}, {"layer_norm_epsilon": 0.25}),
        ("lfm2", "is_tied", {"tie_word_embeddings": True}, {"tie_embedding": False}),
        ("lfm2", "mlp_size", {"intermediate_size": 7}, {"block_ff_dim": 9}),
        ("ernie4.5-moe", "experts", {"num_local_experts": 7}, {"moe_num_experts": 9}),
        ("hunyuan-moe", "active_experts", {"num_experts_per_tok": 1}, {"moe_topk": 2}),
        ("llama", "compute_dtype", {"torch_dtype": "float16"}, {"dtype": "float32"}),
    ],
)
def test_the_first_spelling_goes_first(
    model: str, noun: str, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    (value,) = newer.values()
    description, _ = described(CONFIGS[model] | older)
    changed = type(description)({**vars(description), **older, **newer})
    assert changed.spelled(noun) == value


def test_loading_warns_once_of_keys_that_nothing_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model(MODELS["llama"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    contents = json.loads(path.read_text())
    for more, count in (({}, 0), ({"alibi": True, "attention_sparsity": 3}, 1)):
        path.write_text(json.dumps(contents | more))
        caplog.clear()
        checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
        load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
        warned = [record for record in caplog.records if "nothing reads" in record.message]
        assert len(warned) == count
        assert all(f": {', '.join(more)}" in record.message for record in warned)


def test_families_share_keys_by_their_relations() -> None:
    assert keys_of(families.Qwen3) == keys_of(families.Qwen2) | {"attention_bias": bool}
