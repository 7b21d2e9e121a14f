"""Which decoders the GPU's kernels run."""

from legato.core.errors import UnsupportedModelError
from legato.model.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from legato.model.support import Rules, anything, one_of, unsupported

_SUPPORTED: Rules = {
    DecoderSpec: {
        "vocab_size": anything(),
        "hidden_size": anything(),
        "max_model_len": anything(),
        "norm_eps": anything(),
        "ropes": anything(),
        "layers": anything(),
        "tie_word_embeddings": anything(),
    },
    LayerSpec: {"attention": anything(), "mlp": anything()},
    AttentionSpec: {
        "num_heads": anything(),
        "num_kv_heads": anything(),
        "head_dim": anything(),
        "scale": anything(),
        "rope": one_of("rope", 0),
        "window": anything(),
        "qk_norm": one_of("qk_norm", None, "head"),
        "qkv_bias": anything(),
        "output_bias": anything(),
    },
    MlpSpec: {
        "size": anything(),
        "activation": one_of("activation", "silu"),
        "has_bias": anything(),
    },
}
"""What the kernels compute. They do not know a field that is missing here."""


def check_supported(spec: DecoderSpec) -> None:
    """Raise `UnsupportedModelError` if the kernels cannot compute these layers."""
    if reason := unsupported("GPU layers", spec, _SUPPORTED):
        raise UnsupportedModelError(f"this model runs on CPUs only: {reason}")
