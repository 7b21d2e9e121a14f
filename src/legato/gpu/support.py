"""Which decoders the GPU's kernels run."""

from legato.core.errors import UnsupportedModelError
from legato.model.mixer_spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, ShortConvSpec
from legato.model.mlp_spec import Activation, MlpSpec, MoeSpec
from legato.model.spec import DecoderSpec, LayerInputsSpec, LayerSpec
from legato.model.support import Rule, Rules, anything, one_of, switch, unsupported

ACTIVATIONS: frozenset[Activation] = frozenset({"silu", "gelu_tanh", "relu2"})
"""Those of `legato.gpu.kernels.activation`; PyTorch computes others, but not in experts."""


def _any(*names: str) -> dict[str, Rule]:
    """Allow all values of these fields."""
    return dict.fromkeys(names, anything())


_SUPPORTED: Rules = {
    DecoderSpec: {
        **_any(
            *("vocab_size", "hidden_size", "max_model_len", "norm_eps", "layers", "layer_inputs"),
            *("embedding_scale", "logit_scale", "logit_softcap", "tie_word_embeddings"),
        ),
        "ropes": Rule(
            lambda spec: all(
                rope._fields == ("inverse", "scaling", "query_growth") for rope in spec.ropes
            ),
            "frequencies, a scale, and a growth of queries",
        ),
        "norm": one_of("norm", "rms", "layer"),
        "norm_bias": switch("norm_bias"),
    },
    LayerInputsSpec: _any("size", "vocab_size"),
    LayerSpec: {
        **_any("attention", "recurrence", "mlp", "residual_scale", "mixture", "output_scales"),
        "order": one_of("order", "pre", "post", "sandwich", "parallel", "parallel_two"),
        "has_output_scale": switch("has_output_scale"),
    },
    AttentionSpec: {
        **_any(
            *("num_heads", "num_kv_heads", "head_dim", "scale", "rope", "window", "softcap"),
            *("has_sinks", "qkv_bias", "output_bias", "kv_from"),
        ),
        "is_chunked": one_of("is_chunked", False),
        "qk_norm": one_of("qk_norm", None, "head", "whole"),
        "norm_after_rope": Rule(
            lambda attention: not (attention.norm_after_rope and attention.qk_norm == "whole"),
            "off for norms of whole rows",
        ),
        "has_gate": switch("has_gate"),
        "latent": one_of("latent", None),
        "has_value_norm": switch("has_value_norm"),
        "value_is_key": switch("value_is_key"),
    },
    ShortConvSpec: _any("num_channels", "kernel_size", "has_bias"),
    DeltaNetSpec: _any("num_heads", "num_key_heads", "key_dim", "value_dim", "kernel_size"),
    Mamba2Spec: _any(
        *("num_heads", "num_groups", "head_dim", "state_size", "kernel_size", "has_conv_bias"),
        *("has_bias", "shortest_step", "longest_step", "norm", "scales", "num_group_ranks"),
    ),
    MlpSpec: {
        **_any("size", "has_bias", "gate_scale"),
        "activation": Rule(lambda mlp: mlp.activation != "xielu", "one without weights"),
        "is_gated": switch("is_gated"),
    },
    MoeSpec: {
        **_any(
            *("num_experts", "num_active", "size", "gate_limit", "gate_slope", "has_bias"),
            *("score", "has_router_bias", "has_selection_bias", "num_groups"),
            *("num_active_groups", "group_scores", "is_normalized", "factor", "has_expert_scale"),
            *("shared_size", "has_shared_gate", "latent_size"),
        ),
        "activation": one_of("activation", *sorted(ACTIVATIONS)),
        "is_gated": switch("is_gated"),
        "scales_input": one_of("scales_input", False),
    },
}
"""What the kernels compute. They do not know a field that is missing here."""


def why_not_computed(spec: DecoderSpec) -> str:
    """Return why the kernels cannot compute these layers; empty if they can."""
    return unsupported("GPU layers", spec, _SUPPORTED)


def check_supported(spec: DecoderSpec) -> None:
    """Raise `UnsupportedModelError` if the kernels cannot compute these layers."""
    if reason := why_not_computed(spec):
        raise UnsupportedModelError(f"this model runs on CPUs only: {reason}")
