"""The attention function of transformers' layers, by their attention interface.

Each layer looks the function up by a name in its configuration, as vLLM's and TGI's models do. The
function has no parameter for the step, so a context variable carries that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

NAME = "legato"
"""The value of `attn_implementation` that selects this function."""
SINKS = "s_aux"
"""The option with a learned score for each query head, which has no value."""


class AttentionCall(NamedTuple):
    """What a layer asks for.

    Attributes:
        layer: index among the decoder's layers.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        scale: factor on the query-key products.
        is_causal: whether tokens attend to no later ones.
        options: the layer's other arguments.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    is_causal: bool
    options: dict[str, Any]

    @property
    def sinks(self) -> torch.Tensor | None:
        """[H] float32; None if the layer has none."""
        found: torch.Tensor | None = self.options.get(SINKS)
        return None if found is None else found.float()


Attend = Callable[[AttentionCall], torch.Tensor]
"""Returns attention [T, H, D]."""

_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within the context, layers attend by `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [1, T, H, D], and no weights."""
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    said = options.pop("is_causal", None), getattr(module, "is_causal", None)
    call = AttentionCall(module.layer_idx, query, key, value, scale, False not in said, options)
    return _attend.get()(call).unsqueeze(0), None


AttentionInterface.register(NAME, _forward)
