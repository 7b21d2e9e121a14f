"""A rank's part of a model, which all ranks compute together."""

from collections.abc import Callable
from typing import Protocol

import torch

from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import PackedBatch
from legato.executor.ranks.agreement import Agreement, Exchange
from legato.model.mixer_spec import Mamba2Spec
from legato.model.model import Model
from legato.model.spec import DecoderSpec
from legato.model.states import StepStates


class RankPart(Model, Protocol):
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

    def __init__(self, own: RankPart, agreement: Agreement) -> None:
        self.own = own
        self._agreement = agreement

    def forward(
        self,
        batch: PackedBatch,
        attention: AttentionBackend,
        states: Callable[[], StepStates | None],
        num_layers: int | None,
    ) -> torch.Tensor:
        """See `Model.forward`.

        Args:
            attention: binds the step's block tables.
            states: returns the step's states; it may fail on one rank alone.
        """

        def compute() -> torch.Tensor:
            return self.own.forward(
                batch.input_ids,
                batch.positions,
                attention.begin_step(batch),
                states=states(),
                num_layers=num_layers,
            )

        return self._agreement.together(self._exchanges(batch, num_layers), compute)

    def compute_logits(self, num_rows: int, hidden: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return logits as `Model.compute_logits` does, for the rows of rank 0.

        Args:
            hidden: returns [S, E], of the model's dtype; zeros on all other ranks. It may fail on
                one rank alone.
        """
        part = num_rows, self.own.num_part_tokens
        exchanges = [
            Exchange("sum", (num_rows, self.own.spec.hidden_size), self.own.dtype),
            Exchange("gather", part, torch.float32),
        ]

        def compute() -> torch.Tensor:
            return self.own.compute_logits(self._agreement.sum(hidden().contiguous()))

        return self._agreement.together(exchanges, compute)

    def _exchanges(self, batch: PackedBatch, num_layers: int | None) -> list[Exchange]:
        """Return the exchanges of a forward pass, in their order."""
        spec, num_padded = self.own.spec, len(batch.input_ids)
        shape = num_padded, spec.hidden_size
        exchanges = [Exchange("sum", shape, self.own.dtype)]  # of the embedding
        if spec.layer_inputs is not None:
            width = spec.num_layers * spec.layer_inputs.size
            exchanges.append(Exchange("sum", (num_padded, width), self.own.dtype))
        for layer in spec.layers[:num_layers]:
            mamba = layer.recurrence
            if isinstance(mamba, Mamba2Spec) and mamba.has_shared_norm:
                num_groups = self._agreement.size // mamba.num_group_ranks
                squares = int(batch.query_start[-1]), num_groups
                exchanges.append(Exchange("sum", squares, torch.float32))
            num_networks = sum((layer.has_mixer, layer.mlp is not None, layer.mixture is not None))
            exchanges += [Exchange("sum", shape, self.own.sum_dtype)] * num_networks
        return exchanges
