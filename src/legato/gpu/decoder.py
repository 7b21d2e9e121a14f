"""The decoder on a GPU: PyTorch's weights, with few kernels between the products."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from legato.core.errors import ConfigError
from legato.gpu.experts import GpuExperts, route
from legato.gpu.kernels.activation import gate_heads, silu_mul
from legato.gpu.kernels.attention import attend
from legato.gpu.kernels.attention_parts import AttentionScratch
from legato.gpu.kernels.embedding import embed
from legato.gpu.kernels.experts import sum_outputs
from legato.gpu.kernels.norm import add_rms_norm, normalize
from legato.gpu.kernels.rope import rope_table, rotate_and_write
from legato.gpu.linear import MOST_ROWS, Fp8Linear, QuantizedLinear
from legato.gpu.recurrence import mix
from legato.gpu.step_inputs import StepInputs
from legato.gpu.support import check_supported
from legato.gpu.weights import check_fp8, load_weights
from legato.model.base import NamedWeights
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder, Embedding, embedding_scale
from legato.model.experts import MixtureOfExperts, Router
from legato.model.layers import MLP, Attention, DecoderLayer, RMSNorm
from legato.model.recurrence import Convolution, RecurrentMixer
from legato.model.rope import RotaryEmbedding
from legato.model.spec import DecoderSpec
from legato.model.states import LayerStates


class Memory(NamedTuple):
    """Memory on the device that stays between steps.

    Attributes:
        caches: keys and values of each layer, [num_blocks, K, block size, D].
        block_table: int32 [S + 1, max_blocks].
        last_token: int32 [S + 1], the last token of each request; zeros on all ranks but rank 0,
            which samples.
        scratch: for attention.
        states: of each recurrent layer.
    """

    caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    block_table: torch.Tensor
    last_token: torch.Tensor
    scratch: AttentionScratch
    states: Sequence[LayerStates]


class GpuDecoder(Decoder):
    """A `Model` that computes whole steps from data on the device alone.

    `forward`, which takes any attention, is inherited from PyTorch's decoder; it runs no experts.
    Projections and experts are put on the device when their weights are loaded, since the weights
    decide their kind.

    Args:
        communicator: to the other ranks.
        is_fp8: compute the layers' projections in 8-bit floats.

    Raises:
        ConfigError: this device does not compute with 8-bit floats, or not with this dtype, or
            experts do not.
        UnsupportedModelError: the kernels cannot compute these layers.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Communicator = ALONE,
        is_fp8: bool = False,
    ) -> None:
        check_supported(spec)
        if is_fp8:
            if spec.expert_counts is not None:
                raise ConfigError("quantization fp8 does not take experts; int8 and int4 do")
            check_fp8(dtype, device)
        super().__init__(spec, dtype=dtype, device=torch.device("meta"), communicator=communicator)
        self._is_fp8 = is_fp8
        self._embedding_scale = embedding_scale(spec, dtype)
        self.rotary = nn.ModuleList(RotaryEmbedding(rope, device) for rope in spec.ropes)
        for module in self.modules():
            if isinstance(
                module, Attention | Convolution | Embedding | RecurrentMixer | RMSNorm | Router
            ):
                module.to_empty(device=device, recurse=False)

    @torch.inference_mode()
    def load_weights(self, weights: NamedWeights) -> None:
        self.num_weight_bytes = load_weights(self, weights, device=self.device, is_fp8=self._is_fp8)

    @property
    def most_packed(self) -> int:
        """As in `RowCounts`, of its projections."""
        has_codes = any(isinstance(module, QuantizedLinear) for module in self.modules())
        return MOST_ROWS if has_codes and self.dtype != torch.float32 else 0

    def compute_step(
        self,
        inputs: StepInputs,
        memory: Memory,
        residual: torch.Tensor,
        *,
        num_layers: int | None = None,
    ) -> None:
        """Run the layers; they write keys and values to the cache, and states to their slots.

        Args:
            residual: float32 [P, E]; overwritten with the residual stream after the last layer.
            num_layers: run only the first so many; None runs all.
        """
        self._embed(inputs.input_source, memory.last_token, residual)
        rotary = self.rotary[0]
        assert isinstance(rotary, RotaryEmbedding)
        assert isinstance(rotary.scaling, float)
        table = rope_table(inputs.positions, rotary.inverse, rotary.scaling)
        delta: torch.Tensor | None = None
        scale = 1.0
        for index, layer in enumerate(islice(self.layers, num_layers)):
            assert isinstance(layer, DecoderLayer)
            rows = self._normed(layer.input_layernorm, residual, delta, scale)
            scale = self.spec.layers[index].residual_scale
            mixer = layer.self_attn if layer.recurrence is None else layer.recurrence
            delta = self._communicator.sum(_mixed(mixer, rows, table, inputs, memory))
            rows = self._normed(layer.post_attention_layernorm, residual, delta, scale)
            delta = self._communicator.sum(_feed_forward(layer.mlp, rows, inputs.slot_mapping))
        assert delta is not None
        residual.add_(delta, alpha=scale)

    def hidden_of(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the final norm of rows, int32 [Q], of `compute_step`'s residual: [Q, E]."""
        out = self._new(len(rows), residual.shape[1])
        add_rms_norm(residual, None, self.norm.weight, self.norm.eps, out, rows=rows)
        return out

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write logits of `hidden` [Q, E] to `out` [Q, V], in the model's dtype; on rank 0."""
        if self._communicator.size == 1:
            self._project(hidden, out)
            return
        part = self._new(len(hidden), self.num_part_tokens)
        self._project(hidden, part)
        logits = self._communicator.gather(part)
        if self._communicator.rank == 0:
            out.copy_(logits[:, : out.shape[1]])

    def of_rank_0(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values on all ranks; all have values of the same shape."""
        if self._communicator.rank:
            values = torch.zeros_like(values)
        return self._communicator.sum(values.contiguous())

    def _embed(
        self, input_source: torch.Tensor, last_token: torch.Tensor, residual: torch.Tensor
    ) -> None:
        table, scale = self.embed_tokens, self._embedding_scale
        if self._communicator.size == 1:
            embed(input_source, last_token, table.weight, residual, scale=scale)
            return
        tokens = self._communicator.sum(last_token.clone())
        embed(input_source, tokens, table.weight, residual, scale=scale, first=table.first)
        self._communicator.sum(residual)

    def _project(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of [Q, E] for this rank's part of the vocabulary to `out`."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        weight = getattr(head, "weight", None)
        if weight is None:
            assert self.lm_head is not None
            torch.mul(self.lm_head(hidden), self.spec.logit_scale, out=out)
        else:
            out.addmm_(hidden, weight.t(), beta=0.0, alpha=self.spec.logit_scale)

    def _normed(
        self,
        norm: nn.Module | None,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        assert isinstance(norm, RMSNorm)
        out = self._new(*residual.shape)
        add_rms_norm(residual, delta, norm.weight, norm.eps, out, scale=scale)
        return out

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


def _mixed(
    mixer: nn.Module | None,
    rows: torch.Tensor,
    table: torch.Tensor,
    inputs: StepInputs,
    memory: Memory,
) -> torch.Tensor:
    """Map [P, E] to [P, E]."""
    if isinstance(mixer, Attention):
        return _attention(mixer, rows, table, inputs, memory)
    assert isinstance(mixer, RecurrentMixer)
    assert inputs.states is not None
    states = memory.states[mixer.layer]
    output: torch.Tensor = mixer.out_proj(mix(mixer, mixer.in_proj(rows), inputs.states, states))
    return output


def _attention(
    attention: Attention,
    rows: torch.Tensor,
    table: torch.Tensor,
    inputs: StepInputs,
    memory: Memory,
) -> torch.Tensor:
    """Map [P, E] to [P, E]."""
    qkv = attention.qkv_proj(rows)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    cache = memory.caches[attention.layer]
    gates: torch.Tensor | None = None
    if attention.has_gate:
        size = attention.num_heads * attention.head_dim
        qkv, gates = qkv[:, :-size], qkv[:, -size:]
    if q_norm is not None and k_norm is not None and len(q_norm.weight) != attention.head_dim:
        query_size, kv_size = len(q_norm.weight), len(k_norm.weight)
        normalize(qkv[:, :query_size], q_norm.weight, q_norm.eps)
        normalize(qkv[:, query_size : query_size + kv_size], k_norm.weight, k_norm.eps)
        q_norm = k_norm = None
    query = rotate_and_write(
        qkv,
        table,
        inputs.slot_mapping,
        *cache,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        eps=0.0 if q_norm is None else q_norm.eps,
        is_norm_last=attention.norm_after_rope,
    )
    context = attend(
        query,
        *cache,
        memory.block_table,
        inputs.work,
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        memory.scratch,
        scale=attention.scale,
        sliding_window=attention.sliding_window,
        softcap=attention.softcap,
        sinks=attention.sinks,
    )
    if gates is not None:
        gate_heads(gates, context.flatten(1))
    output: torch.Tensor = attention.o_proj(context.flatten(1))
    return output


def _feed_forward(
    network: nn.Module | None, rows: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Map [P, E] to [P, E]; of rows with negative slots, experts compute nothing."""
    if isinstance(network, MixtureOfExperts):
        return _mixture(network, rows, slots)
    return _mlp(network, rows)


def _mixture(mixture: MixtureOfExperts, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    experts = mixture.get_submodule("experts")
    assert isinstance(experts, GpuExperts)
    picked, weights = route(mixture.gate, rows, slots)
    outputs: torch.Tensor = experts(rows, picked, weights, slots)
    shared = None if mixture.shared_expert is None else _mlp(mixture.shared_expert, rows)
    gate = mixture.shared_expert_gate
    out = torch.empty_like(rows)
    sum_outputs(outputs, shared, None if gate is None else gate(rows), out)
    return out


def _mlp(mlp: nn.Module | None, rows: torch.Tensor) -> torch.Tensor:
    """Map [P, E] to [P, E]."""
    assert isinstance(mlp, MLP)
    gate_up: torch.Tensor = mlp.gate_up_proj(rows)
    down = mlp.down_proj
    if isinstance(down, Fp8Linear):
        return down.of_gated(gate_up)
    gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    silu_mul(gate_up, gated)
    output: torch.Tensor = down(gated)
    return output
