"""What becomes of a checkpoint's weights on the way to a GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from legato.core.errors import ConfigError
from legato.model.decoder import Decoder
from legato.model.linear import Linear
from legato.model.quantization import FLOAT8_TABLE, QuantizedWeight, can_quantize, quantize
from tests.gpu.numbers import assert_near
from tests.model.random_models import decoder_spec, random_decoder

_Weight = torch.Tensor | QuantizedWeight

BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def load(
    plain: Decoder, device: torch.device, change: Callable[[str, torch.Tensor], _Weight]
) -> Decoder:
    from legato.gpu.decoder import GpuDecoder

    decoder = GpuDecoder(plain.spec, dtype=plain.dtype, device=device)
    slots = plain.checkpoint_slots().items()
    decoder.load_weights([(name, change(name, weight)) for name, weight in slots])
    return decoder


def to_codes(name: str, weight: torch.Tensor) -> _Weight:
    """As `--quantization int4` and a GGUF file have it: some in 8 bits, others in 4."""
    if not can_quantize(weight):
        return weight
    return quantize(weight, 8 if "v_proj" in name or "embed" in name else 4)


def stands_for(weight: _Weight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


@pytest.mark.parametrize("is_tied", [True, False])
def test_computes_with_codes(device: torch.device, is_tied: bool) -> None:
    plain = random_decoder(decoder_spec(**BIASES, tie_word_embeddings=is_tied), torch.float32)
    decoder = load(plain, device, to_codes)
    for name, slot in plain.checkpoint_slots().items():
        slot.copy_(stands_for(to_codes(name, slot)))
    assert_same_projections(decoder, plain, device)
    assert not any(isinstance(module, Linear) for module in decoder.modules())
    rows = torch.randn(3, 64)
    assert_near(decoder.compute_logits(rows.to(device)), plain.compute_logits(rows), torch.float32)
    assert decoder.num_weight_bytes < plain.checkpoint_slots()["model.norm.weight"].nbytes + sum(
        weight.numel() for name, weight in plain.named_parameters() if "norm" not in name
    )


def test_steps_of_codes_give_the_tokens_of_what_they_stand_for() -> None:
    """A tied head in codes included."""
    from tests.gpu.executors import Engine, make_executor, request

    sizes = {"block_size": 4, "num_blocks": 8}
    plain = random_decoder(decoder_spec(), torch.float32)
    in_codes = {name: to_codes(name, slot) for name, slot in plain.checkpoint_slots().items()}
    for name, slot in plain.checkpoint_slots().items():
        slot.copy_(stands_for(in_codes[name]))
    tokens = []
    for weights in (plain.checkpoint_slots(), in_codes):
        executor, program = make_executor(plain, **sizes)
        program.model.load_weights(weights.items())
        tokens.append(Engine(executor, **sizes).run([request("a", [5, 20, 45], max_tokens=3)]))
    assert tokens[0] == tokens[1]
    assert not any(isinstance(module, Linear) for module in program.model.modules())


def test_codes_that_are_stored_only_become_plain(device: torch.device) -> None:
    plain = random_decoder(decoder_spec(), torch.float32)
    decoder = load(
        plain, device, lambda _, w: replace(c, is_stored_only=True) if (c := codes(w)) else w
    )
    for slot in plain.checkpoint_slots().values():
        slot.copy_(stands_for(codes(slot) or slot))
    assert_same_projections(decoder, plain, device)
    assert all(isinstance(decoder.get_submodule(path), Linear) for path in projections(plain))
    plain.load_weights(plain.checkpoint_slots().items())
    assert decoder.num_weight_bytes >= plain.num_weight_bytes


def codes(weight: torch.Tensor) -> QuantizedWeight | None:
    return quantize(weight, 8) if can_quantize(weight) else None


def test_a_projection_that_is_quantized_in_part_becomes_plain(device: torch.device) -> None:
    plain = random_decoder(decoder_spec(), torch.float32)
    decoder = load(plain, device, lambda n, w: quantize(w, 8) if "q_proj" in n else w)
    for name, slot in plain.checkpoint_slots().items():
        if "q_proj" in name:
            slot.copy_(quantize(slot, 8).dequantize())
    assert_same_projections(decoder, plain, device)


def projections(decoder: Decoder) -> list[str]:
    return [path for path, module in decoder.named_modules() if isinstance(module, Linear)]


def assert_same_projections(decoder: Decoder, plain: Decoder, device: torch.device) -> None:
    for path in projections(plain):
        linear = plain.get_submodule(path)
        rows = torch.randn(3, linear.weight.shape[1]) / linear.weight.shape[1] ** 0.5
        out = decoder.get_submodule(path)(rows.to(device))
        assert_near(out, linear(rows), torch.float32)
    for name in ("norm", "embed_tokens", "layers.1.input_layernorm"):
        weight = decoder.get_submodule(name).weight
        assert weight.cpu().equal(plain.get_submodule(name).weight), name


def test_layers_of_8_bit_floats(device: torch.device) -> None:
    """All but the head and what has odd sizes; and a step reads half the bytes."""
    from legato.gpu.decoder import GpuDecoder
    from legato.gpu.linear import Fp8Linear

    sizes = {"intermediate_size": 40, "sliding_windows": (None,)}
    spec = decoder_spec(**sizes, qkv_bias=True, tie_word_embeddings=False)
    plain = random_decoder(spec, torch.bfloat16)
    decoder = GpuDecoder(spec, dtype=torch.bfloat16, device=device, is_fp8=True)
    decoder.load_weights(plain.checkpoint_slots().items())
    kinds = {path: type(decoder.get_submodule(path)) for path in projections(plain)}
    is_fp8 = {path for path, kind in kinds.items() if kind is Fp8Linear}
    assert is_fp8 == {path for path in kinds if "self_attn" in path or "gate_up" in path}
    for path in is_fp8:
        linear = plain.get_submodule(path)
        rows = torch.randn(4, linear.weight.shape[1]).bfloat16()
        expected = linear(rows).double()
        out = decoder.get_submodule(path)(rows.to(device)).cpu().double()
        assert (out - expected).norm() / expected.norm() < 0.06, path


@pytest.mark.parametrize(("group", "dtype"), [(64, torch.bfloat16), (32, torch.float16)])
def test_published_8_bit_floats_stay_what_they_are(
    device: torch.device, group: int, dtype: torch.dtype
) -> None:
    """Rows with one scale each are multiplied as floats; others, as codes."""
    from legato.gpu.linear import Fp8Linear, QuantizedLinear

    def in_floats(name: str, weight: torch.Tensor) -> _Weight:
        return floats_of(weight, group) if "proj" in name and weight.ndim == 2 else weight

    spec = decoder_spec(tie_word_embeddings=False, intermediate_size=64, head_dim=16)
    plain = random_decoder(spec, dtype)
    decoder = load(plain, device, in_floats)
    kinds = {type(decoder.get_submodule(path)) for path in projections(plain) if path != "lm_head"}
    assert kinds == {Fp8Linear if group == 64 else QuantizedLinear}
    for name, slot in plain.checkpoint_slots().items():
        slot.copy_(stands_for(in_floats(name, slot)))
    for path in projections(plain):
        linear = plain.get_submodule(path)
        rows = torch.randn(4, linear.weight.shape[1]).to(dtype)
        expected = linear(rows).double()
        out = decoder.get_submodule(path)(rows.to(device)).cpu().double()
        assert (out - expected).norm() / expected.norm() < 0.04, path


def floats_of(weight: torch.Tensor, group: int) -> QuantizedWeight:
    """Rounded to 8-bit floats, with a scale for each group of a row."""
    blocks = weight.float().view(len(weight), -1, group)
    scales = blocks.abs().amax(dim=2) / 448
    values = (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return QuantizedWeight(values.view(torch.uint8), scales, None, 8, table=FLOAT8_TABLE)


def test_an_mlp_of_8_bit_floats_is_that_of_plain_ones(device: torch.device) -> None:
    """Its activation is computed where its results are rounded."""
    from legato.gpu import decoder as gpu_decoder
    from legato.gpu.linear import Fp8Linear

    spec = decoder_spec(sliding_windows=(None,), tie_word_embeddings=False)
    plain = random_decoder(spec, torch.bfloat16)
    decoder = gpu_decoder.GpuDecoder(spec, dtype=torch.bfloat16, device=device, is_fp8=True)
    decoder.load_weights(plain.checkpoint_slots().items())
    mlp = decoder.get_submodule("layers.0.mlp")
    assert isinstance(mlp.down_proj, Fp8Linear)
    rows = torch.randn(4, spec.hidden_size).bfloat16()
    expected = plain.get_submodule("layers.0.mlp")(rows).double()
    out = gpu_decoder._mlp(mlp, rows.to(device)).cpu().double()  # type: ignore[arg-type]
    assert (out - expected).norm() / expected.norm() < 0.1


def test_8_bit_floats_want_bfloat16() -> None:
    from legato.gpu.weights import check_fp8

    with pytest.raises(ConfigError, match="quantization fp8 computes in bfloat16"):
        check_fp8(torch.float16, torch.device("cpu"))


def test_a_gpu_without_8_bit_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from legato.gpu.weights import check_fp8

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"capability 8.9 or later, and this one has 8.0"):
        check_fp8(torch.bfloat16, torch.device("cuda"))
