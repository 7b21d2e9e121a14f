"""The least work of a step, and the least time that it takes on a machine: its roofline.

A step has to read the weights and the cached keys and values, and to multiply: the longer of the
two is the least that it can take (Williams, Waterman and Patterson, 2009). Its operators run one
after another, and some only read while others only multiply, so the sum over operators is a closer
bound.
"""

from collections.abc import Iterable, Mapping

import msgspec

from legato.model.spec import DecoderSpec
from legato.scheduler.step_shape import StepShape

_FLOPS_PER_WEIGHT = 2
_FLOPS_PER_PAIR = 4
"""For each number of a query: multiply and add for the key, and the same for the value."""


class Work(msgspec.Struct, frozen=True):
    """Attributes: num_bytes: to be read."""

    num_bytes: float
    num_flops: float


class MeasuredRates(msgspec.Struct, frozen=True):
    """The machine's measured rates."""

    bytes_a_s: float
    flops_a_s: float

    def least_s(self, work: Work) -> float:
        return max(work.num_bytes / self.bytes_a_s, work.num_flops / self.flops_a_s)

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
        token_bytes: of a token's keys and values in the cache.
        weight_bytes: of all weights that a step reads.
    """
    attentions = spec.attentions
    query_size = sum(attention.query_size for attention in attentions)
    kv_size = sum(attention.kv_size for attention in attentions)
    mlp_size = sum(layer.mlp.size for layer in spec.layers)
    up_size = sum((1 + layer.mlp.is_gated) * layer.mlp.size for layer in spec.layers)
    of_layers = {
        "qkv": spec.hidden_size * (query_size + 2 * kv_size),
        "output": spec.hidden_size * query_size,
        "gate and up": spec.hidden_size * up_size,
        "down": spec.hidden_size * mlp_size,
    }
    if spec.states:
        of_layers["recurrence"] = sum(
            layer.recurrence.num_weights(spec.hidden_size)
            for layer in spec.layers
            if layer.recurrence is not None
        )
    matrices = {name: (size, shape.num_tokens) for name, size in of_layers.items()}
    if shape.num_samples:
        matrices["logits"] = (spec.vocab_size * spec.hidden_size, shape.num_samples)
    pair_flops = _FLOPS_PER_PAIR * query_size
    num_weights = sum(of_layers.values()) + spec.vocab_size * spec.hidden_size
    weight = weight_bytes / num_weights
    operators = {
        name: Work(weight * size, _FLOPS_PER_WEIGHT * size * num_rows)
        for name, (size, num_rows) in matrices.items()
    }
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


def _sum(works: Iterable[Work]) -> Work:
    num_bytes = num_flops = 0.0
    for work in works:
        num_bytes += work.num_bytes
        num_flops += work.num_flops
    return Work(num_bytes, num_flops)
