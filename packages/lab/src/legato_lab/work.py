"""The least work of a step, and the least time that it takes on a machine: its roofline.

A step has to read the weights and the cached keys and values, and to multiply: the longer of the
two is the least that it can take (Williams, Waterman and Patterson, 2009). Its operators run one
after another, and some only read while others only multiply, so the sum over operators is a closer
bound.
"""

from collections.abc import Iterable, Mapping

import msgspec

from legato.core.rows import ExpertCounts
from legato.model.mixer_spec import AttentionSpec
from legato.model.mlp_spec import MlpSpec, MoeSpec
from legato.model.spec import DecoderSpec
from legato.scheduler.step_shape import StepShape

_FLOPS_PER_WEIGHT = 2
_FLOPS_PER_PAIR = 4
"""For each number of a query: multiply and add for the key, and the same for the value."""


class Work(msgspec.Struct, frozen=True):
    """Attributes: num_bytes: to be read."""

    num_bytes: float
    num_flops: float


_NOTHING = Work(0.0, 0.0)


class MeasuredRates(msgspec.Struct, frozen=True):
    """The machine's measured rates."""

    bytes_a_s: float
    flops_a_s: float

    def least_s(self, work: Work) -> float:
        return max(work.num_bytes / self.bytes_a_s, work.num_flops / self.flops_a_s)

    def or_faster(self, other: "MeasuredRates") -> "MeasuredRates":
        """Return the higher of both measurements of each rate."""
        return MeasuredRates(
            max(self.bytes_a_s, other.bytes_a_s), max(self.flops_a_s, other.flops_a_s)
        )

    def operators_s(self, operators: Mapping[str, Work]) -> float:
        """Return the least time of operators that run one after another."""
        return sum(map(self.least_s, operators.values()))


def work_of(spec: DecoderSpec, shape: StepShape, *, token_bytes: int, weight_bytes: int) -> Work:
    """Return the bytes that a step reads, and its arithmetic; arguments as of `operators_of`."""
    return _sum(
        operators_of(spec, shape, token_bytes=token_bytes, weight_bytes=weight_bytes).values()
    )


def operators_of(
    spec: DecoderSpec, shape: StepShape, *, token_bytes: int, weight_bytes: int
) -> dict[str, Work]:
    """Return the work by operator, of all layers together; key its name.

    Args:
        token_bytes: size of a token's keys and values in the cache.
        weight_bytes: size of the weights that a step reads.
    """
    attentions = spec.attentions
    inputs, outputs = zip(*(_projections(own, spec.hidden_size) for own in attentions), strict=True)
    matrices = [
        _Matrix("qkv", sum(inputs)),
        _Matrix("output", sum(outputs)),
        *(
            part
            for layer in spec.layers
            for network in (layer.mlp, layer.mixture)
            for part in _mlp(network, spec.hidden_size, shape.num_tokens)
        ),
        *_recurrences(spec),
        *_layer_inputs(spec),
    ]
    pair_flops = _FLOPS_PER_PAIR * sum(attention.query_size for attention in attentions)
    stored = sum(matrix.stored for matrix in matrices) + spec.vocab_size
    weight = weight_bytes / stored  # of all matrices' rows of the hidden size
    operators: dict[str, Work] = {}
    for matrix in matrices:
        num_flops = _FLOPS_PER_WEIGHT * spec.hidden_size * matrix.used * shape.num_tokens
        own = Work(weight * matrix.read, num_flops)
        operators[matrix.name] = _sum([operators.get(matrix.name, _NOTHING), own])
    if shape.num_samples:
        num_flops = _FLOPS_PER_WEIGHT * spec.hidden_size * spec.vocab_size * shape.num_samples
        operators["logits"] = Work(weight * spec.vocab_size, num_flops)
    if shape.num_decode_rows:
        # Drafts read the same keys as their stream's row, and those of drafts before them.
        keys, pairs = shape.decode_context, shape.decode_context + shape.draft_context
        operators["attention of decodes"] = Work(
            token_bytes * (keys + shape.num_draft_rows), pair_flops * pairs
        )
    if shape.num_prefill_tokens:
        keys, pairs = shape.prefill_context, shape.prefill_area
        operators["attention of chunks"] = Work(token_bytes * keys, pair_flops * pairs)
    return operators


class _Matrix:
    """Rows of the hidden size that a matrix has, that a step reads, and that a token uses."""

    def __init__(
        self, name: str, stored: float, read: float | None = None, used: float | None = None
    ) -> None:
        self.name, self.stored = name, stored
        self.read = stored if read is None else read
        self.used = stored if used is None else used


def _projections(attention: AttentionSpec, hidden_size: int) -> tuple[float, int]:
    """Return rows of the hidden size: of queries, keys and values, and of the output."""
    latent = attention.latent
    if latent is None:
        rows = attention.query_size + attention.key_size + attention.value_size
        return rows, attention.query_size
    num_weights = latent.num_weights(hidden_size, attention.num_heads)
    return num_weights / hidden_size, attention.num_heads * latent.value_dim


def _mlp(mlp: MlpSpec | MoeSpec | None, hidden_size: int, num_tokens: int) -> list[_Matrix]:
    if mlp is None:
        return []
    if isinstance(mlp, MlpSpec):
        return [_Matrix("gate and up", (1 + mlp.is_gated) * mlp.size), _Matrix("down", mlp.size)]
    read = ExpertCounts(mlp.num_experts, mlp.num_active, 1).touched(num_tokens)
    size = mlp.size * (mlp.latent_size or hidden_size) / hidden_size
    experts = [
        _Matrix(name, *(factor * count * size for count in (mlp.num_experts, read, mlp.num_active)))
        for name, factor in (("gate and up", 1 + mlp.is_gated), ("down", 1))
    ]
    if mlp.latent_size is not None:
        experts.append(_Matrix("latent", 2 * mlp.latent_size))
    return experts + _mlp(mlp.shared, hidden_size, num_tokens)


def _recurrences(spec: DecoderSpec) -> list[_Matrix]:
    """Return the projections of the recurrent layers."""
    sizes = [
        layer.recurrence.num_weights(spec.hidden_size)
        for layer in spec.layers
        if layer.recurrence is not None
    ]
    return [_Matrix("recurrence", sum(sizes) / spec.hidden_size)] if sizes else []


def _layer_inputs(spec: DecoderSpec) -> list[_Matrix]:
    """Return the projections of embeddings for each layer: to them, and two in each layer."""
    if spec.layer_inputs is None:
        return []
    return [_Matrix("layer inputs", 3 * spec.num_layers * spec.layer_inputs.size)]


def _sum(works: Iterable[Work]) -> Work:
    num_bytes = num_flops = 0.0
    for work in works:
        num_bytes += work.num_bytes
        num_flops += work.num_flops
    return Work(num_bytes, num_flops)
