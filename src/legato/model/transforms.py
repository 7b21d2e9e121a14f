"""From the tensors of a family's checkpoints to the weights of `Decoder`.

Families name their tensors differently, fuse projections, or rotate other rows of a head. A family
has a list of transforms, which are applied to each tensor while it is read, so that the layers have
one convention. Transforms move whole rows, so a quantized weight stays quantized.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.mlp_spec import MoeSpec
from legato.model.quantization import QuantizedWeight, plain

Weight = torch.Tensor | QuantizedWeight
Named = tuple[str, Weight]
Transform = Callable[[str, Weight], Iterable[Named]]
"""Maps a tensor and its name to tensors that replace it; most tensors stay as they are."""


_GROUPS = (128, 64, 32)
"""Rows that may share a scale, of a quantized matrix that is transposed."""
_FUSED_EXPERTS = re.compile(
    r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight|[._]bias)?"
)


def transformed(tensors: Iterable[Named], transforms: Sequence[Transform]) -> Iterator[Named]:
    """Apply each transform, in order, to each tensor."""
    for name, weight in tensors:
        yield from _applied(name, weight, transforms)


def shapes_after(
    shapes: Mapping[str, tuple[int, ...]], transforms: Sequence[Transform]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that tensors of these shapes have after the transforms.

    Args:
        shapes: key a tensor's name.
    """
    on_paper = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
    return {name: tuple(weight.shape) for name, weight in transformed(on_paper, transforms)}


def rename(names: Mapping[str, str]) -> Transform:
    """Rename parts of dotted names.

    Args:
        names: key one or several adjacent parts of a name, value their replacement; all are
            replaced at once.
    """
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, longest_first))})(?![^.])")

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        yield pattern.sub(lambda found: names[found[0]], name), weight

    return apply


def prefix(begin: str, *, without: tuple[str, ...] = ()) -> Transform:
    """Put `begin` before all names, except names that begin with one of `without`."""

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        yield name if name.startswith(without) else begin + name, weight

    return apply


def drop(*, prefixes: tuple[str, ...] = (), suffixes: tuple[str, ...] = ()) -> Transform:
    """Leave out tensors that are not used, such as those of a vision model."""

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        if not (name.startswith(prefixes) or name.endswith(suffixes)):
            yield name, weight

    return apply


def split(module: str, sizes: Mapping[str, int], *, num_groups: int = 1) -> Transform:
    """Split a fused projection into its parts.

    Args:
        module: last part of the fused projection's name.
        sizes: key the name of a part, value its rows, all groups together.
        num_groups: groups of adjacent rows, each with rows of all parts in order.
    """

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        parent, _, kind = name.rpartition(".")
        if parent.rpartition(".")[2] != module:
            yield name, weight
            return
        parent = parent.rpartition(".")[0]
        group, start = sum(sizes.values()) // num_groups, 0
        for part, size in sizes.items():
            end = start + size // num_groups
            yield f"{parent}.{part}.{kind}", _rows(weight, group, range(start, end))
            start = end

    return apply


def reorder_heads(
    order: Sequence[int], modules: tuple[str, ...] = ("q_proj", "k_proj", "q_norm", "k_norm")
) -> Transform:
    """Reorder the rows of each head of queries and keys, and of their norms and biases.

    Args:
        order: for each row of a head, the row in the checkpoint.
        modules: ends of the names of those projections and norms.
    """

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        is_head = name.rpartition(".")[0].endswith(modules)
        yield name, _rows(weight, len(order), order) if is_head else weight

    return apply


def add_one_to_norms(*, plain_norms: tuple[str, ...] = ()) -> Transform:
    """Add 1 to the weights of norms, which the checkpoint stores minus 1, in float32.

    Args:
        plain_norms: ends of the names of other norms, which it stores as they are.
    """

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        is_changed = name.endswith("norm.weight") and not name.endswith(plain_norms)
        yield name, plain(weight).float() + 1 if is_changed else weight

    return apply


def split_experts(
    experts: MoeSpec, hidden_size: int, *, alternates: bool = False, may_transpose: bool = False
) -> Transform:
    """Split projections of all experts into those of each, and flatten the router's biases.

    A fused weight is [experts, outputs, inputs], or all experts' outputs by inputs if it is
    quantized.

    Args:
        alternates: gates and ups do; a weight that is not quantized is [experts, inputs, outputs],
            and a quantized one that has no other shape is so, too.
        may_transpose: a weight may be so without that. Its shape tells; of as many inputs as
            outputs, it is.
    """
    count, size, width = experts.num_experts, experts.size, experts.latent_size or hidden_size
    sizes = {
        "gate_up_proj": (2 * size, width),
        "gate_proj": (size, width),
        "up_proj": (size, width),
        "down_proj": (width, size),
    }

    def apply(name: str, weight: Weight) -> Iterator[Named]:
        match = _FUSED_EXPERTS.fullmatch(name)
        if match is None:
            is_flattened = name.endswith(".gate.selection_bias")
            yield name, plain(weight).flatten() if is_flattened else weight
            return
        parent, module, suffix = match.groups()
        kind = "bias" if suffix in ("_bias", ".bias") else "weight"
        of_one = sizes[module] if kind == "weight" else sizes[module][:1]
        for expert, own in enumerate(
            _of_each(
                name, weight, count, of_one, alternates=alternates, may_transpose=may_transpose
            )
        ):
            if module != "gate_up_proj":
                yield f"{parent}.{expert}.{module}.{kind}", own
                continue
            for i, part in enumerate(("gate_proj", "up_proj")):
                rows = [i] if alternates else range(i * size, (i + 1) * size)
                part_of = 2 if alternates else 2 * size
                yield f"{parent}.{expert}.{part}.{kind}", _rows(own, part_of, rows)

    return apply


def _of_each(
    name: str,
    weight: Weight,
    count: int,
    of_one: tuple[int, ...],
    *,
    alternates: bool,
    may_transpose: bool,
) -> Iterator[Weight]:
    """Yield each expert's bias [outputs] or weight [outputs, inputs], whose shape is `of_one`."""
    is_turned = tuple(weight.shape) == (count, *of_one[::-1])
    is_transposed = alternates or (may_transpose and is_turned)
    is_matrix = len(of_one) > 1
    is_flat = is_matrix and len(weight.shape) == len(of_one)
    if is_flat:
        shape: tuple[int, ...] = (count * of_one[0], *of_one[1:])
        turned = (count * of_one[1], of_one[0])
        is_transposed = tuple(weight.shape) == turned and (
            may_transpose or (alternates and turned != shape)
        )
        shape = turned if is_transposed else shape
    else:
        shape = (count, *(of_one[::-1] if is_transposed else of_one))
    if tuple(weight.shape) != shape:
        raise UnsupportedModelError(f"{name} has shape {tuple(weight.shape)} instead of {shape}")
    for expert in range(count):
        if is_flat:
            size = shape[0] // count
            own = _rows(weight, weight.shape[0], range(expert * size, (expert + 1) * size))
            yield _transposed(own) if is_transposed else own
        else:
            own = plain(weight)[expert]
            yield own.T if is_transposed and is_matrix else own


def _transposed(weight: Weight) -> Weight:
    """Transpose a matrix; a quantized one stays so if its scales are of blocks of rows, too."""
    if isinstance(weight, torch.Tensor):
        return weight.T
    depth, scales = len(weight.codes), weight.scales
    for group in _GROUPS:
        blocks = scales.reshape(-1, group, scales.shape[1]) if depth % group == 0 else None
        is_plain = weight.minima is None and weight.order is None
        if blocks is not None and is_plain and (blocks == blocks[:, :1]).all():
            own = blocks[:, 0].repeat_interleave(weight.group, dim=1).T.contiguous()
            return replace(weight, codes=weight.codes.T.contiguous(), scales=own)
    return plain(weight).T


def _applied(name: str, weight: Weight, transforms: Sequence[Transform]) -> Iterator[Named]:
    if not transforms:
        yield name, weight
        return
    for part, changed in transforms[0](name, weight):
        yield from _applied(part, changed, transforms[1:])


def _rows(weight: Weight, group: int, rows: Sequence[int]) -> Weight:
    """Take these rows, in this order, of each group of adjacent rows."""
    if not weight.shape or weight.shape[0] % group:
        raise UnsupportedModelError(
            f"a tensor of shape {tuple(weight.shape)} has no groups of {group} rows"
        )

    def take(values: torch.Tensor) -> torch.Tensor:
        groups = values.reshape(-1, group, *values.shape[1:])
        wanted = slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)
        return groups[:, wanted].flatten(0, 1)

    return weight.map(take) if isinstance(weight, QuantizedWeight) else take(weight)
