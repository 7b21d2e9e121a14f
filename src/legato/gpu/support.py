"""Which decoders the GPU's kernels run."""

from legato.core.errors import UnsupportedModelError
from legato.model.mixer_spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, ShortConvSpec
from legato.model.mlp_spec import Activation, MlpSpec, MoeSpec
from legato.model.spec import DecoderSpec, LayerInputsSpec, LayerSpec
from legato.model.support import (
    Rule,
    Rules,
    anything,
    one_of,
    switch,
    unsupported,
)

ACTIVATIONS: frozenset[Activation] = frozenset({"silu", "gelu_tanh", "relu2"})
"""Those of `legato.gpu.kernels.activation`; PyTorch computes others, but not in experts."""

_SUPPORTED: Rules = {
    DecoderSpec: {
        "vocab_size": anything(),
        "hidden_size": anything(),
        "max_model_len": anything(),
        "norm_eps": anything(),
        "ropes": Rule(
            lambda spec: all(
                rope._fields == ("inverse", "scaling", "query_growth") for rope in spec.ropes
            ),
            "frequencies, a scale, and a growth of queries",
        ),
        "layers": anything(),
        "layer_inputs": anything(),
        "norm": one_of("norm", "rms", "layer"),
        "norm_bias": switch("norm_bias"),
        "embedding_scale": anything(),
        "logit_scale": anything(),
        "logit_softcap": anything(),
        "tie_word_embeddings": anything(),
    },
    LayerInputsSpec: {"size": anything(), "vocab_size": anything()},
    LayerSpec: {
        "attention": anything(),
        "recurrence": anything(),
        "mlp": anything(),
        "order": one_of("order", "pre", "post", "sandwich", "parallel", "parallel_two"),
        "residual_scale": anything(),
        "mixture": anything(),
        "has_output_scale": switch("has_output_scale"),
        "output_scales": anything(),
    },
    AttentionSpec: {
        "num_heads": anything(),
        "num_kv_heads": anything(),
        "head_dim": anything(),
        "scale": anything(),
        "rope": anything(),
        "window": anything(),
        "is_chunked": one_of("is_chunked", False),
        "qk_norm": one_of("qk_norm", None, "head", "whole"),
        "norm_after_rope": Rule(
            lambda attention: not (attention.norm_after_rope and attention.qk_norm == "whole"),
            "off for norms of whole rows",
        ),
        "softcap": anything(),
        "has_sinks": anything(),
        "qkv_bias": anything(),
        "output_bias": anything(),
        "has_gate": switch("has_gate"),
        "latent": one_of("latent", None),
        "has_value_norm": switch("has_value_norm"),
        "value_is_key": switch("value_is_key"),
        "kv_from": anything(),
    },
    ShortConvSpec: {
        "num_channels": anything(),
        "kernel_size": anything(),
        "has_bias": anything(),
    },
    DeltaNetSpec: {
        "num_heads": anything(),
        "num_key_heads": anything(),
        "key_dim": anything(),
        "value_dim": anything(),
        "kernel_size": anything(),
    },
    Mamba2Spec: {
        "num_heads": anything(),
        "num_groups": anything(),
        "head_dim": anything(),
        "state_size": anything(),
        "kernel_size": anything(),
        "has_conv_bias": anything(),
        "has_bias": anything(),
        "shortest_step": anything(),
        "longest_step": anything(),
        "norm": anything(),
        "scales": anything(),
        "num_group_ranks": anything(),
    },
    MlpSpec: {
        "size": anything(),
        "activation": Rule(lambda mlp: mlp.activation != "xielu", "one without weights"),
        "is_gated": switch("is_gated"),
        "has_bias": anything(),
        "gate_scale": anything(),
    },
    MoeSpec: {
        "num_experts": anything(),
        "num_active": anything(),
        "size": anything(),
        "activation": one_of("activation", *sorted(ACTIVATIONS)),
        "is_gated": switch("is_gated"),
        "gate_limit": anything(),
        "gate_slope": anything(),
        "has_bias": anything(),
        "score": anything(),
        "has_router_bias": anything(),
        "has_selection_bias": anything(),
        "num_groups": anything(),
        "num_active_groups": anything(),
        "group_scores": anything(),
        "is_normalized": anything(),
        "factor": anything(),
        "scales_input": one_of("scales_input", False),
        "has_expert_scale": anything(),
        "shared_size": anything(),
        "has_shared_gate": anything(),
        "latent_size": anything(),
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
