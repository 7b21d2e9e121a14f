"""Which decoders the native layers take: those that they are listed to compute, and no others."""

from typing import Any, NamedTuple

import msgspec
import pytest

from legato.core.errors import UnsupportedModelError
from legato.model.native import _SUPPORTED, NativeModel, _unsupported
from legato.model.rope import RopeFrequencies
from legato.model.spec import DecoderSpec

from .random_models import SPECS, decoder_spec


class CappedSpec(DecoderSpec, frozen=True, kw_only=True):
    """A decoder of which nobody has told the native layers."""

    logit_softcap: float | None = None


class PartialRope(NamedTuple):
    inverse: tuple[float, ...]
    scaling: float
    num_turned: int = 16


def assert_refused(spec: DecoderSpec, field: str) -> None:
    assert field in _unsupported(spec)
    with pytest.raises(UnsupportedModelError, match=f"native layers cannot .*{field}"):
        NativeModel(spec, None)  # type: ignore[arg-type]


def test_each_field_of_a_spec_is_listed() -> None:
    """Who adds one has to say here which of its values the native layers compute."""
    assert set(_SUPPORTED) == set(DecoderSpec.__struct_fields__)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_listed_is_taken(spec: DecoderSpec) -> None:
    assert _unsupported(spec) == ""


@pytest.mark.parametrize("cap", [None, 30.0])
def test_an_unknown_field_is_refused_whatever_its_value(cap: float | None) -> None:
    known = msgspec.structs.asdict(decoder_spec())
    assert_refused(CappedSpec(**known, logit_softcap=cap), "logit_softcap")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 72),
        ("intermediate_size", 100),
        ("head_dim", 24),
        ("head_dim", 288),
        ("rope", RopeFrequencies((1.0,) * 8, 1.0)),  # of half a head
        ("rope", PartialRope((1.0,) * 16, 1.0)),
        ("sliding_windows", (0, None)),
        ("tie_word_embeddings", "halves"),
        ("qkv_bias", "keys"),
        ("output_bias", None),
        ("mlp_bias", 2),
        ("qk_norm", "layer"),
    ],
)
def test_other_values_are_refused(field: str, value: Any) -> None:
    assert_refused(decoder_spec(**{field: value}), field)
