"""The native layers take the decoders on their list, and no others."""

from typing import Any, NamedTuple

import msgspec
import pytest

from legato.core.errors import UnsupportedModelError
from legato.model.mixer_spec import AttentionSpec
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.native_model import NativeModel
from legato.model.native_support import SUPPORTED, why_not_computed
from legato.model.rope import RopeFrequencies
from legato.model.spec import DecoderSpec, LayerInputsSpec, LayerSpec

from .random_models import EXPERTS, SPECS, decoder_spec


class NewDecoder(DecoderSpec, frozen=True, kw_only=True):
    """Records with a field that the native layers do not know."""

    new: float | None


class NewLayer(LayerSpec, frozen=True, kw_only=True):
    new: float | None


class NewAttention(AttentionSpec, frozen=True, kw_only=True):
    new: float | None


class Experts(msgspec.Struct, frozen=True):
    """A feed-forward network of a kind that the native layers do not know."""

    size: int
    num_experts: int


def fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


class PartialRope(NamedTuple):
    inverse: tuple[float, ...]
    scaling: float
    query_growth: None = None
    num_turned: int = 16


def assert_refused(spec: DecoderSpec, field: str) -> None:
    assert field in why_not_computed(spec)
    with pytest.raises(UnsupportedModelError, match=f"native layers cannot .*{field}"):
        NativeModel(spec, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [DecoderSpec, LayerSpec, AttentionSpec, MlpSpec, MoeSpec])
def test_known_fields_exist(record: type[msgspec.Struct]) -> None:
    assert set(SUPPORTED[record]) <= set(record.__struct_fields__)


ALL_SPECS = SPECS | EXPERTS


@pytest.mark.parametrize("spec", ALL_SPECS.values(), ids=ALL_SPECS)
def test_what_is_listed_is_taken(spec: DecoderSpec) -> None:
    assert why_not_computed(spec) == ""


@pytest.mark.parametrize("value", [None, 30.0])
def test_an_unknown_field_is_refused_whatever_its_value(value: float | None) -> None:
    spec = decoder_spec()
    assert_refused(NewDecoder(**fields(spec), new=value), "new")
    layer = NewLayer(**fields(spec.layers[1]), new=value)
    assert_refused(msgspec.structs.replace(spec, layers=(spec.layers[0], layer)), "new")
    attention = NewAttention(**fields(spec.layers[1].attention), new=value)
    layer = msgspec.structs.replace(spec.layers[1], attention=attention)
    assert_refused(msgspec.structs.replace(spec, layers=(spec.layers[0], layer)), "new")


def test_another_record_is_refused() -> None:
    spec = decoder_spec()
    layer = msgspec.structs.replace(spec.layers[1], mlp=Experts(size=96, num_experts=8))
    assert_refused(msgspec.structs.replace(spec, layers=(spec.layers[0], layer)), "Experts")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 72),
        ("size", 100),
        ("head_dim", 24),
        ("head_dim", 544),
        ("ropes", (RopeFrequencies((1.0,) * 8, 1.0),)),  # of half a head
        ("ropes", (PartialRope((1.0,) * 16, 1.0),)),
        ("tie_word_embeddings", "halves"),
        ("qkv_bias", "keys"),
        ("output_bias", None),
        ("has_bias", 2),
        ("qk_norm", "layer"),
        ("activation", "gelu"),
        ("is_gated", False),
        ("gate_scale", 0.5),
        ("output_scales", (1.0, 1.0, 0.5)),
        ("order", "parallel"),
        ("norm", "layer"),
        ("norm_bias", True),
        ("has_output_scale", 0.5),
        ("has_value_norm", None),
        ("value_is_key", 1),
    ],
)
def test_other_values_are_refused(field: str, value: Any) -> None:
    assert_refused(decoder_spec(**{field: value}), field)


def test_whole_rows_normed_after_rope_are_refused() -> None:
    assert_refused(decoder_spec(qk_norm="whole", norm_after_rope=True), "norm_after_rope")


def test_layers_of_different_sizes_are_taken() -> None:
    """Each rope has angles for the heads of its own layers."""
    replace = msgspec.structs.replace
    ropes = tuple(RopeFrequencies((1.0,) * count, 1.0) for count in (16, 32))
    spec = decoder_spec(ropes=ropes)
    attention = replace(spec.layers[1].attention, num_kv_heads=4, head_dim=64, rope=1)
    layer = replace(spec.layers[1], mlp=MlpSpec(size=64), attention=attention)
    assert why_not_computed(replace(spec, layers=(spec.layers[0], layer))) == ""
    layer = replace(layer, attention=replace(attention, rope=0))
    assert_refused(replace(spec, layers=(spec.layers[0], layer)), "ropes")


def test_embeddings_for_each_layer_of_another_size_are_refused() -> None:
    assert_refused(decoder_spec(layer_inputs=LayerInputsSpec(size=16, vocab_size=100)), "size")


def test_experts_beside_an_mlp_are_refused() -> None:
    spec = decoder_spec(order="sandwich")
    moe = MoeSpec(num_experts=6, num_active=2, size=64)
    layer = msgspec.structs.replace(spec.layers[1], mixture=moe)
    assert_refused(msgspec.structs.replace(spec, layers=(spec.layers[0], layer)), "mixture")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 72),
        ("activation", "gelu"),
        ("shared_size", 72),
        ("has_bias", 2),
        ("is_gated", False),
        ("latent_size", 32),
    ],
)
def test_other_experts_are_refused(field: str, value: Any) -> None:
    assert_refused(decoder_spec(experts={field: value}), field)


def test_different_experts_and_norms_after_experts_are_refused() -> None:
    spec = decoder_spec(experts={})
    other = MoeSpec(num_experts=8, num_active=2, size=64)
    layer = msgspec.structs.replace(spec.layers[1], mlp=other)
    assert_refused(msgspec.structs.replace(spec, layers=(spec.layers[1], layer)), "layers")
    assert_refused(decoder_spec(experts={}, order="post"), "order")


@pytest.mark.parametrize("field", ["attention", "mlp"])
def test_layers_of_one_network_are_refused(field: str) -> None:
    spec = decoder_spec()
    layer = msgspec.structs.replace(spec.layers[1], **{field: None})
    assert_refused(msgspec.structs.replace(spec, layers=(spec.layers[0], layer)), field)


def test_a_window_of_no_keys_is_refused() -> None:
    assert_refused(decoder_spec(sliding_windows=(0, None)), "window")
