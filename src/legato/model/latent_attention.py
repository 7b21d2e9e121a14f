"""Multi-head latent attention on packed rows (DeepSeek-AI, 2024, arXiv:2405.04434).

Attribute names are those of transformers' checkpoints. `legato.model.latent` says how attention
runs on latents. Shapes use the legend of `legato.model.model`, and R for the size of a latent.
"""

from collections.abc import Sequence

import torch
from torch import nn

from legato.model.latent import LatentAttentionSpec
from legato.model.linear import FusedLinear, Linear, MakeEmpty, RMSNorm
from legato.model.model import StepAttention
from legato.model.rope import RotaryTurns, rotate
from legato.model.spec import DecoderSpec


class HeadProjections(nn.Module):
    """From latents to each head's key and value; queries are projected instead of keys.

    It is no `Linear`, whose weight may be laid out for products with hidden states.
    """

    def __init__(self, own: LatentAttentionSpec, num_heads: int, empty: MakeEmpty) -> None:
        super().__init__()
        self._shape = num_heads, own.nope_dim + own.value_dim, own.kv_rank
        self._nope_dim = own.nope_dim
        size = num_heads * (own.nope_dim + own.value_dim)
        self.weight = nn.Parameter(empty(size, own.kv_rank), requires_grad=False)

    def query_latents(self, query: torch.Tensor) -> torch.Tensor:
        """Map queries [T, H, nope_dim] to [T, H, R], whose products with latents are the scores."""
        keys = self.weight.view(self._shape)[:, : self._nope_dim]
        return torch.bmm(query.transpose(0, 1), keys).transpose(0, 1)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Map weighted sums of latents [T, H, R] to those of values, [T, H, value_dim]."""
        values = self.weight.view(self._shape)[:, self._nope_dim :]
        return torch.bmm(latents.transpose(0, 1), values.mT).transpose(0, 1)


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, empty: MakeEmpty) -> None:
        super().__init__()
        own = spec.layers[layer].attention
        assert own is not None
        latent = own.latent
        assert latent is not None
        self.layer = spec.cache_layer(layer)
        self.num_heads, self.scale, self.rope = own.num_heads, own.scale, own.rope
        self.kv_rank = latent.kv_rank
        self.query_parts = [latent.nope_dim, latent.rope_dim]
        query_size = own.num_heads * latent.query_dim
        sizes = {"q_proj": query_size} if latent.q_rank is None else {"q_a_proj": latent.q_rank}
        sizes["kv_a_proj_with_mqa"] = latent.key_dim
        self.sizes = list(sizes.values())
        self.qkv_a_proj = FusedLinear(spec.hidden_size, sizes, latent.has_bias, empty)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if latent.q_rank is not None:
            self.q_a_layernorm = RMSNorm(latent.q_rank, latent.norm_eps, empty)
            self.q_b_proj = Linear(latent.q_rank, query_size, False, empty)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, latent.norm_eps, empty)
        self.kv_b_proj = HeadProjections(latent, own.num_heads, empty)
        value_size = own.num_heads * latent.value_dim
        self.o_proj = Linear(value_size, spec.hidden_size, own.output_bias, empty)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[RotaryTurns],
        attention: StepAttention,
    ) -> torch.Tensor:
        """Map [T, E] to [T, E]; `ropes` has the step's turns by each of the decoder's ropes."""
        num_tokens, num_heads = hidden.shape[0], self.num_heads
        turns = ropes[self.rope]
        queries, keys = torch.split(self.qkv_a_proj(hidden), self.sizes, dim=-1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            queries = self.q_b_proj(self.q_a_layernorm(queries))
        query = queries.view(num_tokens, num_heads, -1)
        still, turned = torch.split(query, self.query_parts, dim=-1)
        latent, turned_key = keys[:, None, : self.kv_rank], keys[:, None, self.kv_rank :]
        # Queries and the key are rotated together: see `Attention`.
        turned = rotate(torch.cat((turned, turned_key), dim=1), turns.cos, turns.sin)
        query = torch.cat((self.kv_b_proj.query_latents(still), turned[:, :num_heads]), dim=-1)
        key = torch.cat((self.kv_a_layernorm(latent), turned[:, num_heads:]), dim=-1)
        context = attention.attend(
            self.layer,
            query if turns.query_scale is None else query * turns.query_scale,
            key,
            key,
            scale=self.scale,
            sliding_window=None,
        )
        values = self.kv_b_proj.values(context[..., : self.kv_rank])
        output: torch.Tensor = self.o_proj(values.reshape(num_tokens, -1))
        return output
