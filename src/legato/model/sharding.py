"""Divides each weight among ranks.

Projections with divided outputs ("colwise") come before those with divided inputs ("rowwise"), so
that attention and MLP each end in one sum over all ranks (Shoeybi et al., 2019, arXiv:1909.08053).
The words, and the division of each projection, are those of transformers' `base_model_tp_plan`.
"""

import re
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from legato.model.communicator import Communicator, part_size
from legato.model.quantization import QuantizedWeight, plain
from legato.model.spec import LAYER_INPUTS_TABLE, DecoderSpec
from legato.model.transformers_spec import TransformersSpec

_Weight = torch.Tensor | QuantizedWeight
Division = Literal["colwise", "rowwise"]

_OF_LAYER: dict[str, Division] = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
"""Key a module of a layer, or of an expert."""
_DIVISIONS = {**_OF_LAYER, "self_attn.gate_proj": "colwise", "recurrence.out_proj": "rowwise"}
"""The same with modules that transformers' plans do not name. Other modules are whole on every
rank, apart from those of recurrent mixers (`RowParts`)."""
_OF_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight", LAYER_INPUTS_TABLE)
_NAME = re.compile(r"model\.layers\.\d+\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"^(mixture\.)?mlp\.(experts\.\d+|shared_expert)\.")
_MIXER = re.compile(r"model\.layers\.(\d+)\.recurrence\.(\w+)(\.weight|\.bias)?")
_SINKS = ".self_attn.sinks"


def shard(
    name: str, weight: _Weight, spec: DecoderSpec | TransformersSpec, communicator: Communicator
) -> _Weight:
    """Return a rank's part of a weight; it may share memory with the whole.

    Args:
        name: in transformers' checkpoints.
        weight: its size divides evenly, unless it has a row for each token.
        spec: of the whole decoder.
    """
    if communicator.size == 1:
        return weight
    if name in _OF_VOCABULARY or name.endswith(_SINKS):
        return _rows(weight, communicator)
    if (parts := _row_parts(name, spec, communicator.size)) is not None:
        return _rows_of_parts(weight, *parts, communicator)
    match = _NAME.fullmatch(name)
    division = _DIVISIONS.get(_EXPERT.sub("mlp.", match[1])) if match else None
    if division == "colwise":
        return _rows(weight, communicator)
    if match is None or division is None:
        return weight
    return _columns(weight, communicator) if match[2] == "weight" else _once(weight, communicator)


def _rows(weight: _Weight, communicator: Communicator) -> _Weight:
    """Return a rank's rows, padded with zeros so that all ranks have as many."""
    num_rows = part_size(weight.shape[0], communicator.size)
    first = communicator.rank * num_rows

    def part(values: torch.Tensor) -> torch.Tensor:
        own = values[first : first + num_rows]
        num_missing = num_rows - len(own)
        return F.pad(own, (0, 0) * (own.ndim - 1) + (0, num_missing)) if num_missing else own

    return weight.map(part) if isinstance(weight, QuantizedWeight) else part(weight)


def _row_parts(
    name: str, spec: DecoderSpec | TransformersSpec, num_ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes of the parts of a recurrent mixer's rows: of the whole, and of each rank.

    None if it is another weight, or one that is not divided by rows.
    """
    match = _MIXER.fullmatch(name)
    if match is None:
        return None
    assert isinstance(spec, DecoderSpec)
    own = spec.layers[int(match[1])].recurrence
    assert own is not None
    if match[2] not in own.row_parts:
        return None
    return own.row_parts[match[2]], own.part(num_ranks).row_parts[match[2]]


def _rows_of_parts(
    weight: _Weight, sizes: Sequence[int], own_sizes: Sequence[int], communicator: Communicator
) -> _Weight:
    """Return a rank's rows of each part; adjacent ranks share rows if there are too few."""
    rows: list[slice] = []
    start = 0
    for size, own in zip(sizes, own_sizes, strict=True):
        first = start + communicator.rank * size // (communicator.size * own) * own
        rows.append(slice(first, first + own))
        start += size

    def part(values: torch.Tensor) -> torch.Tensor:
        return values[rows[0]] if len(rows) == 1 else torch.cat([values[own] for own in rows])

    return weight.map(part) if isinstance(weight, QuantizedWeight) else part(weight)


def _columns(weight: _Weight, communicator: Communicator) -> _Weight:
    """Return a rank's columns.

    They stay quantized unless a group of codes would be cut, or the columns are in another order.
    """
    num_columns = weight.shape[1] // communicator.size
    if isinstance(weight, QuantizedWeight):
        weight = weight.in_columns(num_columns)
    if (
        isinstance(weight, QuantizedWeight)
        and weight.order is None
        and num_columns % weight.group == 0
    ):
        return weight.map(lambda values: values.chunk(communicator.size, dim=1)[communicator.rank])
    return plain(weight).chunk(communicator.size, dim=1)[communicator.rank]


def _once(bias: _Weight, communicator: Communicator) -> _Weight:
    """Return the bias of a sum over all ranks on rank 0, zeros elsewhere: it is added only once."""
    return bias if communicator.rank == 0 else torch.zeros_like(plain(bias))
