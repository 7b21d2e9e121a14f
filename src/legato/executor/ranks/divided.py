"""A rank's part of a model, which all ranks compute together."""

from collections.abc import Callable
from typing import Protocol

import torch

from legato.executor.ranks.agreement import Agreement, Exchange
from legato.model.base import Model, StepAttention
from legato.model.spec import DecoderSpec


class Part(Model, Protocol):
    """A rank's part of a model.

    Attributes:
        spec: the part's specification.
        num_part_tokens: vocabulary entries whose logits it computes, padding included.
        sum_dtype: dtype in which the parts of a layer are summed.
    """

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def num_part_tokens(self) -> int: ...

    @property
    def sum_dtype(self) -> torch.dtype: ...


class DividedModel:
    """Runs a rank's part of the model. Each call succeeds on all ranks or on none.

    All ranks make the same calls in the same order.

    Args:
        own: this rank's part, with `agreement` for its communicator.
    """

    def __init__(self, own: Part, agreement: Agreement) -> None:
        self.own = own
        self._agreement = agreement

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        begin: Callable[[], StepAttention],
        num_layers: int | None,
    ) -> torch.Tensor:
        """See `Model.forward`.

        Args:
            begin: binds the step's block tables.
        """
        shape = len(input_ids), self.own.spec.hidden_size
        num_run = self.own.spec.num_layers if num_layers is None else num_layers
        exchanges = [
            Exchange("sum", shape, self.own.dtype),  # of the embedding
            *[Exchange("sum", shape, self.own.sum_dtype)] * (2 * num_run),
        ]

        def compute() -> torch.Tensor:
            return self.own.forward(input_ids, positions, begin(), num_layers=num_layers)

        return self._agreement.together(exchanges, compute)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as `Model.compute_logits` does, for the rows of rank 0.

        Args:
            hidden: [S, E]; zeros on all other ranks.
        """
        part = len(hidden), self.own.num_part_tokens
        exchanges = [
            Exchange("sum", tuple(hidden.shape), hidden.dtype),
            Exchange("gather", part, torch.float32),
        ]

        def compute() -> torch.Tensor:
            return self.own.compute_logits(self._agreement.sum(hidden.contiguous()))

        return self._agreement.together(exchanges, compute)
