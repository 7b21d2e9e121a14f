"""Grouped-query attention of one layer. Shapes use the legend of `legato.model.model`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.linear import FusedLinear, Linear, MakeEmpty, RMSNorm
from legato.model.model import StepAttention
from legato.model.rope import RotaryTurns, rotate
from legato.model.spec import DecoderSpec


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al., 2023, arXiv:2305.13245) of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, empty: MakeEmpty) -> None:
        super().__init__()
        own = spec.layers[layer].attention
        assert own is not None
        self.layer = spec.cache_layer(layer)
        self.num_heads, self.num_kv_heads = own.num_heads, own.num_kv_heads
        self.head_dim = own.head_dim
        self.scale = own.scale
        self.sliding_window, self.is_chunked = own.window, own.is_chunked
        self.rope = own.rope
        sizes = {
            "q_proj": own.query_size,
            "k_proj": own.key_size,
            "v_proj": own.value_size,
            "gate_proj": own.query_size if own.has_gate else 0,
        }
        sizes = {name: size for name, size in sizes.items() if size}
        self.has_gate = own.has_gate
        self.has_own_kv = own.kv_from is None
        self.value_is_key = own.value_is_key
        self.value_eps = spec.norm_eps if own.has_value_norm else None
        self.qkv_proj = FusedLinear(spec.hidden_size, sizes, own.qkv_bias, empty)
        self.o_proj = Linear(own.query_size, spec.hidden_size, own.output_bias, empty)
        self.softcap = own.softcap
        self.sinks: nn.Parameter | None = None
        if own.has_sinks:
            self.sinks = nn.Parameter(empty(own.num_heads).float(), requires_grad=False)
        self.norm_after_rope = own.norm_after_rope
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if own.qk_norm is not None:
            is_whole, is_plain = own.qk_norm == "whole", own.qk_norm == "plain_head"
            size = own.query_size if is_whole else own.head_dim
            self.q_norm = RMSNorm(size, spec.norm_eps, empty, is_plain=is_plain)
            if self.has_own_kv:
                size = own.kv_size if is_whole else own.head_dim
                self.k_norm = RMSNorm(size, spec.norm_eps, empty, is_plain=is_plain)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[RotaryTurns],
        attention: StepAttention,
    ) -> torch.Tensor:
        """Map [T, E] to [T, E]; `ropes` has the step's turns by each of the decoder's ropes."""
        num_tokens, num_heads = hidden.shape[0], self.num_heads
        turns = ropes[self.rope]
        rows = self.qkv_proj(hidden).view(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
        # Queries and keys are rotated together, which halves the number of small operations.
        num_rotated = num_heads + (self.num_kv_heads if self.has_own_kv else 0)
        qk = rows[:, :num_rotated]
        if not self.norm_after_rope:
            qk = self._normed(qk)
        qk = rotate(qk, turns.cos, turns.sin)
        if self.norm_after_rope:
            qk = self._normed(qk)
        query = qk[:, :num_heads]
        context = attention.attend(
            self.layer,
            query if turns.query_scale is None else query * turns.query_scale,
            qk[:, num_heads:] if self.has_own_kv else None,
            self._values(rows) if self.has_own_kv else None,
            scale=self.scale,
            sliding_window=self.sliding_window,
            is_chunked=self.is_chunked,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        if self.has_gate:
            context = context * rows[:, -num_heads:].sigmoid()
        output: torch.Tensor = self.o_proj(context.reshape(num_tokens, -1))
        return output

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [T, K, D] of projected rows; the keys' rows if values are keys."""
        first = self.num_heads + (0 if self.value_is_key else self.num_kv_heads)
        values = rows[:, first : first + self.num_kv_heads]
        if self.value_eps is None:
            return values
        return F.rms_norm(values.float(), values.shape[-1:], eps=self.value_eps).to(values.dtype)

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalize queries and keys, [T, H + K, D], if the model does."""
        parts = []
        for norm, heads in (
            (self.q_norm, qk[:, : self.num_heads]),
            (self.k_norm, qk[:, self.num_heads :]),
        ):
            if norm is None:
                continue
            rows = heads.reshape(len(heads), -1, len(norm.weight))
            parts.append(norm(rows).view(heads.shape))
        return torch.cat(parts, dim=1) if parts else qk
