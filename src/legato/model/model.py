"""The interface of models, for the executor that runs them and the loader that fills them.

Shapes here and in the layers use one legend: T packed tokens of the step (all requests, no
padding), H query heads, K key/value heads, D head size, E hidden size, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from legato.core.rows import RowCounts
from legato.model.quantization import QuantizedWeight
from legato.model.states import StepStates

NamedWeights = Iterable[tuple[str, torch.Tensor | QuantizedWeight]]
"""(name in transformers' checkpoints, weight) pairs."""


SCALE_BYTES = 4
"""Size of the float32 scale of a quantized key or value."""


class StepAttention(Protocol):
    """Attention over one step's packed batch, bound to the KV cache and its block tables."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        is_chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values to the cache, then attend causally within each request.

        Args:
            layer: index among the layers that keep keys and values; it selects the cache.
            query: [T, H, D], rotary embedding applied.
            key: [T, K, D], likewise; None if an earlier call of the step has written the keys and
                values of this layer.
            value: [T, K, D]; the keys themselves if the cache has no values; None if `key` is.
            scale: factor on the query-key products.
            sliding_window: a query at position p sees keys at (p - sliding_window, p]; None sees
                all keys at [0, p].
            is_chunked: the window is a chunk: p sees keys at [p - p % sliding_window, p].
            softcap: c, where a scaled product s becomes c * tanh(s / c); None leaves it as it is.
            sinks: [H] float32, a further score of each query head, which has no value.

        Returns:
            [T, H, D] in the query's dtype.
        """
        ...


class FirstRows(NamedTuple):
    """The rows [0, num_rows) of a batch, none of them padding, and the step's attention for them.

    Rows after them are dropped: they are no earlier position of any row that is kept.
    """

    num_rows: int
    attention: StepAttention


class LayerWatch(Protocol):
    """Looks at the clock between layers, and may drop the last rows of a batch from there on."""

    def looks(self, num_layers: int) -> Sequence[int]:
        """Begin to watch; return the numbers of layers after which to call `look`, ascending.

        Args:
            num_layers: of the whole step; the numbers are in (0, num_layers).
        """
        ...

    def look(self, num_done: int) -> FirstRows | None:
        """Return the rows that the layers after the first `num_done` compute; None drops none."""
        ...


class LayerCache(NamedTuple):
    """What a layer keeps of each token: a key and a value [K, D].

    Attributes:
        window: keys visible to a query; None if all are.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What attention stores for each token.

    Each layer has two tensors of blocks, one for keys and one for values, or only the first. A
    block is contiguous memory, copied as a whole: K heads, one after the other. A head's part of a
    block is

    - the numbers [block_size, D] of its tokens, in the order that the backend's kernels need,
    - then, in a quantized cache, float32 scales [block_size] of these tokens.

    Quantized numbers are int8, from -127 to 127; a value is the product of number and scale. They
    are those of mixed heads (`executor.attention.rounding.mix`).

    Attributes:
        layers: those with keys and values of their own. Those of a group have one geometry: as many
            heads, of the same size.
        dtype: of keys and values, and of the cache unless it is quantized.
        is_quantized: whether the cache is int8.
        has_values: whether values are stored; if not, a key is its own value.
    """

    layers: tuple[LayerCache, ...]
    dtype: torch.dtype
    is_quantized: bool = False
    has_values: bool = True

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_one_geometry(self) -> bool:
        return len({layer[:2] for layer in self.layers}) == 1

    @cached_property
    def _geometry(self) -> tuple[int, int]:
        """Heads and their size, if all layers have the same."""
        assert self.has_one_geometry
        return self.layers[0][:2]

    @property
    def num_kv_heads(self) -> int:
        """Heads of every layer, if they have one geometry."""
        return self._geometry[0]

    @property
    def head_dim(self) -> int:
        """Size of a head of every layer, if they have one geometry."""
        return self._geometry[1]

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """For each layer, keys visible to a query; None if all are."""
        return tuple(layer.window for layer in self.layers)

    @property
    def num_planes(self) -> int:
        """Tensors of blocks that a layer has."""
        return 2 if self.has_values else 1

    @property
    def kept_dtype(self) -> torch.dtype:
        """Dtype of the numbers in the cache."""
        return torch.int8 if self.is_quantized else self.dtype

    @property
    def layer_numbers(self) -> int:
        """Size of a token's keys, or values, of one layer, in units of `kept_dtype`.

        All layers have one geometry.
        """
        return self._numbers_of(*self._geometry)

    @property
    def token_bytes(self) -> int:
        """Size of a token's keys and values in all layers, scales included."""
        numbers = sum(self._numbers_of(*layer[:2]) for layer in self.layers)
        return self.num_planes * numbers * self.kept_dtype.itemsize

    def _numbers_of(self, num_kv_heads: int, head_dim: int) -> int:
        return num_kv_heads * (head_dim + (SCALE_BYTES if self.is_quantized else 0))

    @property
    def whole(self) -> "CacheGroup":
        """All layers, of one geometry, as one group that keeps all tokens."""
        return CacheGroup(tuple(range(self.num_layers)), self)

    def groups(self, max_model_len: int) -> "tuple[CacheGroup, ...]":
        """Return the layers grouped by their geometry, and by the tokens that they may still read.

        The first group keeps all tokens of a request: it has layers without a window that is
        shorter than the longest request, or layers with the widest window if all have one. Layers
        of another geometry that read all tokens have a window as long as that request.
        """
        members: dict[LayerCache, list[int]] = {}
        for index, layer in enumerate(self.layers):
            is_windowed = layer.window is not None and layer.window < max_model_len
            kind = layer if is_windowed else layer._replace(window=None)
            members.setdefault(kind, []).append(index)
        kinds = sorted(members, key=lambda kind: (kind.window is not None, -(kind.window or 0)))
        return tuple(
            CacheGroup(
                tuple(members[kind]),
                replace(self, layers=tuple(self.layers[i] for i in members[kind])),
                window=(kind.window or max_model_len) if index else None,
            )
            for index, kind in enumerate(kinds)
        )


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables and blocks.

    Attributes:
        layers: their indices in the whole cache.
        cache: what these layers keep of each token.
        window: last tokens of a request that it keeps; None if it keeps all.
    """

    layers: tuple[int, ...]
    cache: CacheSpec
    window: int | None = None


class Model(Protocol):
    """A decoder-only transformer over packed rows, which knows nothing of requests.

    Attributes:
        cache: layout of the KV cache that its attention needs.
        dtype: of its weights and of the results of `forward`.
        device: where its inputs and outputs are.
        num_weight_bytes: weights read in a step; known once they are loaded.
        num_torch_threads: of PyTorch's operations during a step; None leaves PyTorch's setting.
        drops_rows: whether `forward` takes a watch.
        rows: the numbers of rows to which its inputs are padded.
    """

    @property
    def num_torch_threads(self) -> int | None: ...

    @property
    def drops_rows(self) -> bool: ...

    @property
    def rows(self) -> RowCounts: ...

    @property
    def cache(self) -> CacheSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def num_weight_bytes(self) -> int: ...

    def load_weights(self, weights: NamedWeights) -> None:
        """Load all weights of a checkpoint; a weight may share memory with a file."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        states: StepStates | None = None,
        num_layers: int | None = None,
        watch: LayerWatch | None = None,
    ) -> torch.Tensor:
        """Run the layers. Call it under `torch.inference_mode`.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, position of each token in its request, from 0.
            attention: of this step; called once in each layer that has one.
            states: of the recurrent layers; None if the model has none.
            num_layers: run only the first so many, at least one; None runs all.
            watch: may drop the last rows between layers; None drops none.

        Returns:
            [T, E] in the model's dtype, after the final norm; of fewer rows if some were dropped.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] float32 for hidden states [S, E] from `forward`."""
        ...
