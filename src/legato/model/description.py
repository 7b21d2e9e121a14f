"""A checkpoint's description of its decoder, as in transformers' config.json. Torch-free.

transformers' own configurations are not used: to import one takes longer than to load the default
model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from legato.core.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""
_STRETCHED_TYPES = ("llama3", "yarn", "longrope")
"""Rope types that depend on the model's context length before it was stretched."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that Legato reads, with defaults for missing ones.

    Attributes:
        rope_scaling: the name of `rope_parameters` in older checkpoints.
        rope_theta, partial_rotary_factor, original_max_position_embeddings: used if the rope
            parameters lack them.
        num_local_experts, num_experts, n_routed_experts, moe_num_experts: names of one number.
        num_experts_per_tok, moe_k, moe_topk: likewise; moe_topk may be a list, one for each layer.
        n_shared_experts, moe_num_shared_experts: likewise.
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes of latent
            attention; without q_lora_rank, queries have no latent.
        per_layer_config: fields of some layers, key a layer's index; without it, Gemma 4 has
            `global_head_dim` and `num_global_key_value_heads` in layers with full attention.
        block_ff_dim, tie_embedding: LFM2's names of `intermediate_size`, `tie_word_embeddings`.
        layers_block_type, hybrid_override_pattern: kinds of layers, as a list or a letter each.
        n_groups, ssm_state_size, conv_kernel, use_conv_bias, mamba_num_heads, mamba_head_dim,
            mlp_hidden_act, layer_norm_epsilon: Nemotron-H's names of others.
        time_step_limit: shortest and longest; infinity is {"__float__": "Infinity"}.
        dtype, torch_dtype: the new name and the old one.
        served_len: positions that are served, None for all; not a field of config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    mlp_hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-5
    norm_epsilon: float = 1e-5
    norm_eps: float = 1e-5
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    sliding_window_pattern: int | str | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str = ""
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    use_parallel_residual: bool = True
    query_pre_attn_scalar: float = 256
    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logit_scale: float = 0.0625
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] | None = None
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | str | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int | None = None
    vocab_size_per_layer_input: int = 2**18
    enable_moe_block: bool = False
    top_k_experts: int | None = None
    num_local_experts: int = 0
    num_experts: int | None = None
    n_routed_experts: int | None = None
    moe_num_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_k: int | None = None
    moe_topk: int | list[int] | None = None
    moe_intermediate_size: int | list[int] | None = None
    n_shared_experts: int = 0
    moe_num_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int | None = 1
    topk_group: int | None = 1
    topk_method: str | None = None
    scoring_func: str | None = None
    mlp_layer_types: list[str] | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = None
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    first_k_dense_replace: int = 0
    num_dense_layers: int = 0
    use_expert_bias: bool = True
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    moe_layer_start_index: int = 0
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    clip_qkv: float | None = None
    use_qk_norm: bool = False
    qkv_bias: bool = True
    rotary_dim: int | None = None
    shared_intermediate_size: int | None = None
    position_embedding_type: str | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = 10000.0
    rope_local_base_freq: float = 10000.0
    rotary_emb_base: float = 10000.0
    rotary_pct: float = 0.25
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: float | None = None
    conv_bias: bool = False
    conv_kernel_size: int = msgspec.field(default=3, name="conv_L_cache")
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str | None = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_d_ssm: int | None = None
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    mamba_hidden_act: str = "silu"
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    ssm_state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    use_conv_bias: bool = True
    projectors_bias: bool = False
    time_step_limit: list[float | dict[str, str]] | None = None
    block_ff_dim: int | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256
    full_attn_idxs: list[int] | None = None
    tie_embedding: bool | None = None
    dtype: Any = None
    torch_dtype: Any = None
    served_len: int | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_count(self) -> int:
        """Experts of a layer with experts; 0 if there are none."""
        names = (self.num_experts, self.n_routed_experts, self.moe_num_experts)
        return next((count for count in names if count is not None), self.num_local_experts)

    @property
    def active_expert_count(self) -> int:
        """Experts that compute a token.

        Raises:
            UnsupportedModelError: layers differ.
        """
        count = self.num_experts_per_tok if self.moe_k is None else self.moe_k
        return count if self.moe_topk is None else _same(self.moe_topk, "moe_topk")

    @property
    def expert_size(self) -> int:
        """Width of an expert.

        Raises:
            UnsupportedModelError: layers differ.
        """
        if self.moe_intermediate_size is None:
            return self.intermediate_size
        return _same(self.moe_intermediate_size, "moe_intermediate_size")

    @property
    def rope(self) -> dict[str, Any]:
        """All rope parameters of the layers, including the type.

        Raises:
            UnsupportedModelError: layers have parameters of their own.
        """
        own = self.rope_scaling or self.rope_parameters or {}
        if _is_nested(own):
            raise UnsupportedModelError("rope parameters of each kind of layer are not supported")
        return self._complete(own, self.rope_theta)

    def rope_of(self, kind: str, *, theta: float) -> dict[str, Any]:
        """Return all rope parameters of one kind of layers, of a family where kinds differ.

        Older checkpoints have one set of parameters, apart from theta. It is for full attention.

        Args:
            kind: as in `layer_types`.
            theta: used if the parameters lack it.
        """
        own = self.rope_scaling or self.rope_parameters or {}
        if _is_nested(own):
            own = own.get(kind) or {}
        elif kind != FULL:
            own = {}
        return self._complete(own, theta)

    def _complete(self, own: Mapping[str, Any], theta: float) -> dict[str, Any]:
        rope = {"rope_theta": theta, "rope_type": own.get("type", "default"), **own}
        if self.partial_rotary_factor is not None:
            rope.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if rope["rope_type"] in _STRETCHED_TYPES:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if self.original_max_position_embeddings is not None:
                rope["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope

    def kinds(self, interval: int) -> tuple[str, ...]:
        """Return the kind of attention of each layer: `layer_types`, or a pattern if it is missing.

        Args:
            interval: of the pattern, whose every so many-th layer has full attention; 0 for
                full attention everywhere.

        Raises:
            UnsupportedModelError: a layer of a type other than full or sliding attention.
        """
        types = self.layer_types
        if types is None:
            return tuple(
                SLIDING if interval and (i + 1) % interval else FULL
                for i in range(self.num_hidden_layers)
            )
        if len(types) != self.num_hidden_layers:
            raise UnsupportedModelError(
                f"layer_types has {len(types)} entries for {self.num_hidden_layers} layers"
            )
        for layer_type in types:
            if layer_type not in (FULL, SLIDING):
                raise UnsupportedModelError(f"unsupported layer type {layer_type!r}")
        return tuple(types)

    def windows_of(self, kinds: Sequence[str]) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for layers with full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in kinds)

    def windows(self, window: int | None, *, num_full: int) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for layers with full attention.

        Args:
            window: of the layers with one.
            num_full: number of first layers without one, used if `layer_types` is missing.

        Raises:
            UnsupportedModelError: a layer of a type other than full or sliding attention.
        """
        if self.layer_types is None:
            return tuple(window if i >= num_full else None for i in range(self.num_hidden_layers))
        return tuple(window if kind == SLIDING else None for kind in self.kinds(0))


def _same(values: int | list[int], name: str) -> int:
    """Return the one value that all layers have."""
    if isinstance(values, int):
        return values
    if len(set(values)) != 1:
        raise UnsupportedModelError(f"{name} differs between layers, which is not supported")
    return values[0]


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    """Whether rope parameters are given for each kind of layers."""
    return any(isinstance(value, Mapping) for value in parameters.values())
