"""The decoder on a GPU: PyTorch's weights, with few kernels between the products."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from legato.core.errors import ConfigError
from legato.gpu.experts import GpuExperts, route
from legato.gpu.kernels.activation import apply_gates, gate_heads
from legato.gpu.kernels.attention import attend
from legato.gpu.kernels.attention_parts import AttentionScratch
from legato.gpu.kernels.embedding import embed
from legato.gpu.kernels.experts import sum_outputs
from legato.gpu.kernels.mixing import mix_heads
from legato.gpu.kernels.norm import add_rms_norm, normalize
from legato.gpu.kernels.rope import rope_table, rotate_and_write
from legato.gpu.linear import MOST_ROWS, Fp8Linear, QuantizedLinear
from legato.gpu.recurrence import mix
from legato.gpu.step_inputs import StepInputs
from legato.gpu.support import ACTIVATIONS, check_supported
from legato.gpu.weights import check_fp8, load_weights
from legato.model.attention_layer import Attention
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder, TokenEmbedding, embedding_scale
from legato.model.decoder_layer import DecoderLayer
from legato.model.experts import ExpertRouter, MixtureBesideMlp, MixtureOfExperts
from legato.model.linear import LayerNorm, RMSNorm, scaled
from legato.model.mlp import MLP, UngatedMLP
from legato.model.model import NamedWeights
from legato.model.recurrence import Convolution, RecurrentMixer
from legato.model.rope import RotaryEmbedding
from legato.model.spec import DecoderSpec, LayerSpec
from legato.model.states import LayerStates


class GpuLayerCache(NamedTuple):
    """A layer's part of the cache, and what it shares with its group.

    Attributes:
        group: index of its cache group.
        keys, values: [num_blocks, K, block size, D].
        block_table: int32 [S + 1, max_blocks].
    """

    group: int
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    scratch: AttentionScratch


class DecoderMemory(NamedTuple):
    """Memory on the device that stays between steps.

    Attributes:
        caches: of each layer that keeps keys and values.
        last_token: int32 [S + 1], the last token of each request; zeros on all ranks but rank 0,
            which samples.
        states: of each recurrent layer.
    """

    caches: Sequence[GpuLayerCache]
    last_token: torch.Tensor
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
                module,
                Attention
                | Convolution
                | DecoderLayer
                | TokenEmbedding
                | LayerNorm
                | RecurrentMixer
                | RMSNorm
                | ExpertRouter,
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
        memory: DecoderMemory,
        residual: torch.Tensor,
        *,
        num_layers: int | None = None,
    ) -> None:
        """Run the layers; they write keys and values to the cache, and states to their slots.

        Args:
            residual: float32 [P, E]; overwritten with the residual stream after the last layer.
            num_layers: run only the first so many; None runs all.
        """
        tokens = memory.last_token
        if self._communicator.size > 1:
            tokens = self._communicator.sum(tokens.clone())
        self._embed(inputs.input_source, tokens, residual)
        layer_inputs = self._layer_inputs(inputs.input_source, tokens, residual)
        ropes = [_turns(rotary, inputs.positions) for rotary in self.rotary]
        stream = _ResidualStream(residual, self.dtype)
        for index, layer in enumerate(islice(self.layers, num_layers)):
            assert isinstance(layer, DecoderLayer)
            self._add_layer(stream, layer, self.spec.layers[index], ropes, inputs, memory)
            if layer_inputs is not None:
                assert layer.layer_input is not None
                values = stream.settled()
                values.add_(layer.layer_input(values, layer_inputs[:, index]))
            if layer.layer_scalar is not None:
                stream.settled().mul_(layer.layer_scalar)
        stream.settled()

    def _add_layer(
        self,
        stream: "_ResidualStream",
        layer: DecoderLayer,
        own: LayerSpec,
        ropes: Sequence["_Turns"],
        inputs: StepInputs,
        memory: DecoderMemory,
    ) -> None:
        """Add a layer's outputs, as `DecoderLayer.forward` does."""
        *mixer_scales, mlp_scale = own.output_scales
        mixed: torch.Tensor | None = None
        if own.has_mixer:
            rows = stream.rows(layer.input_layernorm)
            mixed = _mixed(layer, rows, ropes, inputs, memory, mixer_scales)
            mixed = self._communicator.sum(mixed)
            if not own.is_parallel:
                stream.add(mixed, own.residual_scale, layer.attention_output_layernorm)
        if own.mlp is not None:
            if not own.is_parallel or layer.post_attention_layernorm is not None:
                rows = stream.rows(layer.post_attention_layernorm)
            slots = inputs.groups[0].slot_mapping
            output = scaled(_feed_forward(layer.mlp, rows, slots), mlp_scale)
            output = self._communicator.sum(output)
            if layer.mixture is not None:
                assert isinstance(layer.mixture, MixtureBesideMlp)
                experts = partial(_mixture, layer.mixture.mlp, slots)
                output = layer.mixture.added(experts, stream.settled(), output)
            if own.is_parallel and mixed is not None:
                stream.add(mixed, own.residual_scale, None)
            stream.add(output, own.residual_scale, layer.mlp_output_layernorm)

    def hidden_of(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the final norm of rows, int32 [Q], of `compute_step`'s residual: [Q, E]."""
        if not isinstance(self.norm, RMSNorm):
            normed: torch.Tensor = self.norm(residual.index_select(0, rows))
            return normed
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
        self, input_source: torch.Tensor, tokens: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Write the embeddings of a step's rows; `tokens` are the last ones of all requests."""
        table, scale = self.embed_tokens, self._embedding_scale
        embed(input_source, tokens, table.weight, residual, scale=scale, first=table.first)
        self._communicator.sum(residual)

    def _layer_inputs(
        self, input_source: torch.Tensor, tokens: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the rows' embeddings for each layer [P, layers, size]; None if there are none."""
        if self.layer_inputs is None:
            return None
        sampled = tokens.index_select(0, (-1 - input_source).clamp_(min=0))
        ids = torch.where(input_source < 0, sampled, input_source).long()
        embeddings: torch.Tensor = self.layer_inputs(ids, residual)
        return embeddings

    def _project(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of [Q, E] for this rank's part of the vocabulary to `out`."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        weight = getattr(head, "weight", None)
        if weight is None:
            assert self.lm_head is not None
            torch.mul(self.lm_head(hidden), self.spec.logit_scale, out=out)
        else:
            out.addmm_(hidden, weight.t(), beta=0.0, alpha=self.spec.logit_scale)
        if (cap := self.spec.logit_softcap) is not None:
            out.copy_((out.float() / cap).tanh_().mul_(cap))

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


class _ResidualStream:
    """A step's residual stream. What is added last waits for the next norm: one kernel does both.

    Args:
        values: float32 [P, E].
        dtype: of the rows that networks read.
    """

    def __init__(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        self._values, self._dtype = values, dtype
        self._added: torch.Tensor | None = None
        self._scale = 1.0

    def add(self, output: torch.Tensor, scale: float, norm: nn.Module | None) -> None:
        """Add `scale` times a network's output [P, E], normalized first if there is a norm."""
        self.settled()
        if isinstance(norm, RMSNorm):
            normalize(output, norm.weight, norm.eps)
        elif norm is not None:
            output = norm(output)
        self._added, self._scale = output, scale

    def rows(self, norm: nn.Module | None) -> torch.Tensor:
        """Return what a network reads: [P, E], normalized if there is a norm."""
        if not isinstance(norm, RMSNorm):
            values = self.settled()
            return values.to(self._dtype) if norm is None else norm(values)
        out = torch.empty_like(self._values, dtype=self._dtype)
        add_rms_norm(self._values, self._added, norm.weight, norm.eps, out, scale=self._scale)
        self._added = None
        return out

    def settled(self) -> torch.Tensor:
        """Return the stream, float32 [P, E], after what waits was added."""
        if self._added is not None:
            self._values.add_(self._added, alpha=self._scale)
            self._added = None
        return self._values


class _Turns(NamedTuple):
    """How a step's rows rotate.

    Attributes:
        table: of `rope_table`.
        query_scale: float32 [P, 1, 1], factors on the rotated queries; None if there are none.
    """

    table: torch.Tensor
    query_scale: torch.Tensor | None


def _turns(rotary: nn.Module, positions: torch.Tensor) -> _Turns:
    assert isinstance(rotary, RotaryEmbedding)
    table = rope_table(positions, rotary.inverse, rotary.scaling)
    scale = rotary.query_scale(positions)
    return _Turns(table, None if scale is None else scale[:, None, None])


def _mixed(
    layer: DecoderLayer,
    rows: torch.Tensor,
    ropes: Sequence[_Turns],
    inputs: StepInputs,
    memory: DecoderMemory,
    scales: Sequence[float],
) -> torch.Tensor:
    """Map [P, E] to [P, E]: the sum of attention and recurrence, each times its scale."""
    outputs: list[torch.Tensor] = []
    attention, recurrence = layer.self_attn, layer.recurrence
    if attention is not None:
        assert isinstance(attention, Attention)
        output = _attention(attention, rows, ropes[attention.rope], inputs, memory)
        outputs.append(scaled(output, scales[0]))
    if recurrence is not None:
        assert isinstance(recurrence, RecurrentMixer)
        outputs.append(scaled(_recurrence(recurrence, rows, inputs, memory), scales[1]))
    return outputs[0] if len(outputs) == 1 else outputs[0].add_(outputs[1])


def _recurrence(
    mixer: RecurrentMixer, rows: torch.Tensor, inputs: StepInputs, memory: DecoderMemory
) -> torch.Tensor:
    """Map [P, E] to [P, E]."""
    assert inputs.states is not None
    states = memory.states[mixer.layer]
    output: torch.Tensor = mixer.out_proj(mix(mixer, mixer.in_proj(rows), inputs.states, states))
    return output


def _attention(
    attention: Attention,
    rows: torch.Tensor,
    turns: _Turns,
    inputs: StepInputs,
    memory: DecoderMemory,
) -> torch.Tensor:
    """Map [P, E] to [P, E]."""
    qkv = attention.qkv_proj(rows)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    cache = memory.caches[attention.layer]
    own = inputs.groups[cache.group]
    gates: torch.Tensor | None = None
    if attention.has_gate:
        size = attention.num_heads * attention.head_dim
        qkv, gates = qkv[:, :-size], qkv[:, -size:]
    if q_norm is not None and k_norm is not None and len(q_norm.weight) != attention.head_dim:
        query_size, kv_size = len(q_norm.weight), len(k_norm.weight)
        normalize(qkv[:, :query_size], q_norm.weight, q_norm.eps)
        normalize(qkv[:, query_size : query_size + kv_size], k_norm.weight, k_norm.eps)
        q_norm = k_norm = None
    if attention.value_is_key:
        qkv = torch.cat((qkv, qkv[:, attention.num_heads * attention.head_dim :]), dim=1)
    if attention.value_eps is not None and attention.has_own_kv:
        heads = qkv.view(len(qkv), -1, attention.head_dim)
        values = heads[:, -attention.num_kv_heads :]
        values.copy_(F.rms_norm(values.float(), values.shape[-1:], eps=attention.value_eps))
    query = rotate_and_write(
        qkv,
        turns.table,
        own.slot_mapping,
        cache.keys,
        cache.values,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        eps=0.0 if q_norm is None else q_norm.eps,
        is_norm_last=attention.norm_after_rope,
        has_keys=attention.has_own_kv,
    )
    if turns.query_scale is not None:
        query.mul_(turns.query_scale)
    context = attend(
        query,
        cache.keys,
        cache.values,
        cache.block_table,
        own.work,
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        cache.scratch,
        scale=attention.scale,
        sliding_window=attention.sliding_window,
        softcap=attention.softcap,
        sinks=attention.sinks,
    )
    if cache.keys.dtype == torch.int8:
        mix_heads(context)
    if gates is not None:
        gate_heads(gates, context.flatten(1))
    output: torch.Tensor = attention.o_proj(context.flatten(1))
    return output


def _feed_forward(
    network: nn.Module | None, rows: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Map [P, E] to [P, E]; of rows with negative slots, experts compute nothing."""
    if isinstance(network, MixtureOfExperts):
        return _mixture(network, slots, rows)
    return _mlp(network, rows)


def _mixture(
    mixture: MixtureOfExperts,
    slots: torch.Tensor,
    rows: torch.Tensor,
    routed: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `MixtureOfExperts.forward`."""
    experts = mixture.get_submodule("experts")
    assert isinstance(experts, GpuExperts)
    picked, weights = route(mixture.gate, rows if routed is None else routed, slots)
    to_latent, from_latent = mixture.fc1_latent_proj, mixture.fc2_latent_proj
    inner: torch.Tensor = rows if to_latent is None else to_latent(rows)
    outputs: torch.Tensor = experts(inner, picked, weights, slots)
    shared = None if mixture.shared_expert is None else _mlp(mixture.shared_expert, rows)
    gate = mixture.shared_expert_gate
    gates = None if gate is None else gate(rows)
    out = torch.empty_like(inner)
    if from_latent is None:
        sum_outputs(outputs, shared, gates, out)
        return out
    sum_outputs(outputs, None, None, out)
    total: torch.Tensor = from_latent(out)
    if shared is not None:
        total.add_(shared if gates is None else shared * gates.sigmoid())
    return total


def _mlp(mlp: nn.Module | None, rows: torch.Tensor) -> torch.Tensor:
    """Map [P, E] to [P, E]."""
    assert isinstance(mlp, MLP | UngatedMLP)
    if isinstance(mlp, UngatedMLP) or mlp.gate_scale != 1.0 or mlp.activation not in ACTIVATIONS:
        output: torch.Tensor = mlp(rows)
        return output
    gate_up: torch.Tensor = mlp.gate_up_proj(rows)
    down = mlp.down_proj
    if isinstance(down, Fp8Linear):
        return down.of_gated(gate_up, mlp.activation)
    gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    apply_gates(gate_up, gated, mlp.activation)
    product: torch.Tensor = down(gated)
    return product
