"""A roofline: costs of steps on GPUs that were not measured, from datasheets.

A step reads all weights and multiplies by them. Both overlap, so only the longer counts: up to some
number of tokens they are free, and beyond it each costs its arithmetic.
"""

import msgspec

from legato.core.errors import ConfigError
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts

_FLOPS_PER_WEIGHT = 2
_STATE_BYTES = 4
"""Bytes of a number in a recurrent state."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU's figures from its datasheet.

    Attributes:
        flops_per_s: in the dtype of the weights, dense.
        link_bytes_per_s: to other GPUs, in one direction; 0 if there is no other.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float = 0.0


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a config.json that a roofline depends on.

    Attributes:
        full_attention_interval: one layer in so many has attention; the others are recurrent, with
            a state of `linear_num_value_heads` matrices a request, in float32. A recurrent layer
            is taken to have as many weights as one with attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    full_attention_interval: int = 1
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_attention_layers(self) -> int:
        return self.num_hidden_layers // self.full_attention_interval

    @property
    def state_bytes(self) -> float:
        """Size of a request's recurrent states in all layers."""
        num_recurrent = self.num_hidden_layers - self.num_attention_layers
        state_size = self.linear_key_head_dim * self.linear_value_head_dim
        return float(_STATE_BYTES * num_recurrent * self.linear_num_value_heads * state_size)


class Roofline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on one or several GPUs, with the share of the datasheet's figures that kernels reach.

    Attributes:
        model: a sliding window and experts are ignored.
        tensor_parallel_size: GPUs that share each layer; two all-reduces a layer pass between them.
        weight_bytes: of a weight: 2 in bfloat16, 1 in an 8-bit format.
        kv_bytes: of a number in the cache; activations have 2.
        memory_efficiency, matmul_efficiency, attention_efficiency, link_efficiency: shares reached.
        all_reduce_s: of one all-reduce, however small.
        memory_utilization: share of the memory for weights and cache.
    """

    gpu: Gpu
    model: ModelSizes
    tensor_parallel_size: int = 1
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    memory_efficiency: float = 0.8
    matmul_efficiency: float = 0.6
    attention_efficiency: float = 0.5
    link_efficiency: float = 0.7
    all_reduce_s: float = 20e-6
    memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}"
            )
        if self.tensor_parallel_size > 1 and not self.gpu.link_bytes_per_s > 0.0:
            raise ConfigError("GPUs that share layers need link_bytes_per_s")
        figures = (
            *("memory_efficiency", "matmul_efficiency", "attention_efficiency", "link_efficiency"),
            *("memory_utilization", "weight_bytes", "kv_bytes"),
        )
        for name in figures:
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("memory_bytes", "memory_bytes_per_s", "flops_per_s"):
            if not getattr(self.gpu, name) > 0.0:
                raise ConfigError(f"{name} must be positive, got {getattr(self.gpu, name)}")

    @property
    def costs(self) -> StepCosts:
        """Costs of steps; the GPUs share all work but the all-reduces."""
        num_gpus, model = self.tensor_parallel_size, self.model
        bytes_per_s = self.memory_efficiency * self.gpu.memory_bytes_per_s
        matmul_flops_per_s = self.matmul_efficiency * self.gpu.flops_per_s
        layer_weights, head_weights = self._layer_weights / num_gpus, self._head_weights / num_gpus
        # A step reads only the batch's rows of the embeddings.
        weights_s = (layer_weights + head_weights) * self.weight_bytes / bytes_per_s
        layers_s = layer_weights * self.weight_bytes / bytes_per_s
        token_s = layer_weights * _FLOPS_PER_WEIGHT / matmul_flops_per_s
        bounds = (0, *ROW_BOUNDS, 2 * ROW_BOUNDS[-1])
        beyond_s = [max(0.0, num_tokens * token_s - layers_s) for num_tokens in bounds]
        row_s = [
            (beyond_s[i + 1] - beyond_s[i]) / (bounds[i + 1] - bounds[i])
            for i in range(len(bounds) - 1)
        ]
        kv_s = self._kv_bytes_a_gpu / bytes_per_s
        # For each query-key pair, each number of the query is multiplied and added once for the
        # score, and again for the weighted sum of the values.
        pair_flops = 4 * self._query_size * model.num_attention_layers / num_gpus
        area_s = pair_flops / (self.attention_efficiency * self.gpu.flops_per_s)
        state_s = 2.0 * model.state_bytes / num_gpus / bytes_per_s  # read and written
        return StepCosts(
            step_s=weights_s + self._num_all_reduces * self.all_reduce_s,
            row_s=tuple(seconds + self._all_reduce_token_s for seconds in row_s),
            decode_row_s=state_s,
            decode_context_s=kv_s,
            # A stream's keys are read for its row anyway; a draft adds only its own.
            draft_row_s=kv_s,
            draft_context_s=area_s,
            chunk_s=state_s,
            area_s=area_s,
            context_s=kv_s,
            sample_s=head_weights * _FLOPS_PER_WEIGHT / matmul_flops_per_s,
        )

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens in the memory that weights and embeddings leave.

        Raises:
            ConfigError: they leave none.
        """
        num_gpus = self.tensor_parallel_size
        num_tables = 1 if self.model.tie_word_embeddings else 2
        weights = self._layer_weights + num_tables * self._head_weights
        room = (
            self.memory_utilization * self.gpu.memory_bytes - weights * self.weight_bytes / num_gpus
        )
        if room < self._kv_bytes_a_gpu:
            raise ConfigError(
                f"{weights * self.weight_bytes / 1e9:.0f} GB of weights do not fit into the memory "
                f"of {num_gpus} GPUs"
            )
        return int(room / self._kv_bytes_a_gpu)

    @property
    def kv_token_bytes(self) -> float:
        """Size of a token's keys and values on all GPUs together, each head counted once."""
        num_layers = self.model.num_attention_layers
        num_numbers = 2 * num_layers * self._num_kv_heads * self.model.head_size
        return num_numbers * self.kv_bytes

    @property
    def _query_size(self) -> int:
        return self.model.num_attention_heads * self.model.head_size

    @property
    def _num_kv_heads(self) -> int:
        return self.model.num_key_value_heads or self.model.num_attention_heads

    @property
    def _layer_weights(self) -> int:
        """Query and output, key and value, gate and up and down projections, of all layers."""
        model, kv_size = self.model, self._num_kv_heads * self.model.head_size
        a_layer = 2 * self._query_size + 2 * kv_size + 3 * model.intermediate_size
        return model.num_hidden_layers * model.hidden_size * a_layer

    @property
    def _head_weights(self) -> int:
        return self.model.hidden_size * self.model.vocab_size

    @property
    def _kv_bytes_a_gpu(self) -> float:
        """Size of a token in each GPU's cache; with fewer heads than GPUs, each has a copy."""
        num_heads = -(-self._num_kv_heads // self.tensor_parallel_size)
        num_layers = self.model.num_attention_layers
        return 2 * num_layers * num_heads * self.model.head_size * self.kv_bytes

    @property
    def _num_all_reduces(self) -> int:
        return 2 * self.model.num_hidden_layers if self.tensor_parallel_size > 1 else 0

    @property
    def _all_reduce_token_s(self) -> float:
        """Time for a token's activations around a ring, in all layers."""
        num_gpus = self.tensor_parallel_size
        if num_gpus == 1:
            return 0.0
        num_bytes = 2 * (num_gpus - 1) / num_gpus * 2 * self.model.hidden_size
        speed = self.link_efficiency * self.gpu.link_bytes_per_s
        return self._num_all_reduces * num_bytes / speed
