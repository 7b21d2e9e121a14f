"""From the tensors of a checkpoint to the weights of transformers' layers.

transformers renames, splits and stacks tensors as it loads them, so that the layers of a family are
the same for checkpoints of all ages. The rules are transformers' own.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from legato.core.errors import UnsupportedModelError
from legato.model.quantization import QuantizedWeight
from legato.model.transformers_paper import matrices, on_paper
from legato.model.transformers_spec import TransformersSpec
from legato.model.transforms import Named


class TransformersTensors:
    """Names and shapes of the weights of transformers' layers.

    Attributes:
        shapes: key the name of a weight; the layers need all. Matrices are [out, in].
    """

    def __init__(self, spec: TransformersSpec) -> None:
        self._model = model = on_paper(json.loads(spec.config), torch.float32)
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._own = model.state_dict()
        self._transposed = {
            f"{name}.weight"
            for name, module in matrices(model).items()
            if isinstance(module, Conv1D)
        }
        self._unused = [
            re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()
        ]
        self._computed = {name for name, _ in model.named_buffers() if name not in self._own}
        self.shapes = {
            name: tuple(self._turned(name, weight).shape)
            for name, weight in self._own.items()
            if name not in model.all_tied_weights_keys
        }

    def converted(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield the weights that these tensors of a checkpoint are, the stacked ones last.

        Raises:
            UnsupportedModelError: tensors that are stacked or split are quantized.
        """
        waiting: dict[str, WeightConverter] = {}
        for name, tensor in tensors:
            new, pattern = self._renamed(name)
            if pattern is None:
                if not self._is_unused(new):
                    yield new, self._turned(new, tensor)
                continue
            if isinstance(tensor, QuantizedWeight):
                raise UnsupportedModelError(
                    f"{name} is quantized, and transformers' layers hold it in another form"
                )
            if new not in waiting:
                waiting[new] = deepcopy(
                    next(rule for rule in self._converters if pattern in rule.source_patterns)
                )
            waiting[new].add_tensor(new, name, pattern, tensor)
        for new, rule in waiting.items():
            found = rule.convert(new, model=self._model, config=self._model.config)
            for part, weight in found.items():
                yield part, weight[0] if isinstance(weight, list) else weight

    def shapes_after(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes that tensors of these shapes have as weights; key the name."""
        on_paper = ((name, torch.empty(shapes[name], device="meta")) for name in in_order(shapes))
        return {name: tuple(weight.shape) for name, weight in self.converted(on_paper)}

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return a weight's name, and the pattern of the rule that converts it."""
        new, pattern = rename_source_key(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._own
        )
        return (name, None) if new not in self._own and name in self._own else (new, pattern)

    def _is_unused(self, name: str) -> bool:
        if name in self._own:
            return False
        return (
            name in self._computed
            or name.endswith("rotary_emb.inv_freq")
            or any(pattern.search(name) for pattern in self._unused)
        )

    def _turned(
        self, name: str, weight: torch.Tensor | QuantizedWeight
    ) -> torch.Tensor | QuantizedWeight:
        if name not in self._transposed:
            return weight
        if isinstance(weight, QuantizedWeight):
            raise UnsupportedModelError(f"{name} is quantized, and transformers' layers turn it")
        return weight.t()


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order in which their tensors are stacked: by the numbers in them."""
    return sorted(names, key=dot_natural_key)
