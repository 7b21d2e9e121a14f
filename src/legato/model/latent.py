"""Multi-head latent attention, as a record (DeepSeek-AI, 2024, arXiv:2405.04434).

A token's keys and values of all heads are projected from one small vector, its latent. Heads share
the rotated part of the key. A query times a key is the query, projected by the transposed matrix,
times the latent, and a weighted sum of values is projected from the sum of latents. So attention
runs on latents alone, as one key/value head whose values are its keys, and the cache keeps nothing
else ("absorbed" attention).
"""

import msgspec

from legato.core.validation import Eps, Size


class LatentAttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an attention layer makes queries, keys and values, if keys are latents.

    `AttentionSpec` has what attends: all query heads, and one key/value head of `key_dim`.

    Attributes:
        q_rank: size of the latent that queries are projected from; None if they are projected from
            the hidden states.
        kv_rank: size of the latent that keys and values are projected from.
        nope_dim, rope_dim: parts of a head's query that do not rotate, and that rotate.
        value_dim: size of a head's value.
        norm_eps: added to the mean square in the norms of latents.
        has_bias: projections into latents have biases.
    """

    q_rank: Size | None
    kv_rank: Size
    nope_dim: Size
    rope_dim: Size
    value_dim: Size
    norm_eps: Eps = 1e-6
    has_bias: bool = False

    @property
    def query_dim(self) -> int:
        """Size of a head's query, as it is projected."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Size of a token's key in the cache: its latent, then the part that rotates."""
        return self.kv_rank + self.rope_dim

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the size of the projections, but for the output's."""
        queries = num_heads * self.query_dim
        if self.q_rank is None:
            from_hidden, from_latent = queries, 0
        else:
            from_hidden, from_latent = self.q_rank, self.q_rank * queries
        of_heads = self.kv_rank * num_heads * (self.nope_dim + self.value_dim)
        return hidden_size * (from_hidden + self.key_dim) + from_latent + of_heads
