"""The records of feed-forward networks: MLPs, and mixtures of experts."""

from typing import Literal

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.core.validation import Count, Scale, Size

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A feed-forward network, gated (`act(gate) * up`) or not (`act(up)`).

    Attributes:
        size: width of its activations.
        has_bias: its projections have biases.
        gate_scale: factor on the gate, before the activation.
    """

    size: Size
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    gate_scale: Scale = 1.0


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A mixture of experts: a router picks a few MLPs for each row (arXiv:1701.06538).

    Attributes:
        num_active: experts that compute a row.
        size: width of an expert's activations.
        is_gated: the experts, and the MLP for all rows, are `act(gate) * up` rather than `act(up)`.
        gate_limit: limit of gates from above, and of the other projection from both sides; the
            product is then `(up + 1) * gate * sigmoid(gate_slope * gate)`, as in gpt-oss. None for
            `act(gate) * up`.
        has_bias: the experts' projections have biases.
        score: of an expert, from the router's logits: a softmax, a softmax of the picked ones
            alone, or a sigmoid.
        has_router_bias: the logits have biases.
        has_selection_bias: scores have biases while experts are picked.
        num_groups, num_active_groups: groups of adjacent experts, and groups with picked experts;
            those with the largest sum of their best scores.
        group_scores: number of best scores that count for a group.
        is_normalized: the weights of a row's experts are scores divided by their sum.
        factor: on the weights.
        scales_input: weights multiply what experts read, not their outputs.
        has_expert_scale: each expert has a learned factor on its weight.
        shared_size: width of an MLP that computes all rows; None if there is none.
        has_shared_gate: its output is multiplied by a gate, one number a row.
        latent_size: size of the rows that experts map, between two projections that they share;
            None if they map the hidden states themselves.

    Raises:
        UnsupportedModelError: more experts are picked than there are, or groups are uneven.
    """

    num_experts: Count
    num_active: Count
    size: Size
    activation: Activation = "silu"
    is_gated: bool = True
    gate_limit: Scale | None = None
    gate_slope: Scale = 1.0
    has_bias: bool = False
    score: Literal["softmax", "softmax_of_active", "sigmoid"] = "softmax"
    has_router_bias: bool = False
    has_selection_bias: bool = False
    num_groups: Count = 1
    num_active_groups: Count = 1
    group_scores: Count = 2
    is_normalized: bool = True
    factor: Scale = 1.0
    scales_input: bool = False
    has_expert_scale: bool = False
    shared_size: Size | None = None
    has_shared_gate: bool = False
    latent_size: Size | None = None

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_experts} experts cannot be divided into {self.num_groups} groups"
            )
        group = self.num_experts // self.num_groups
        if not 0 < self.num_active <= group * self.num_active_groups <= self.num_experts:
            raise UnsupportedModelError(
                f"{self.num_active} experts of {self.num_active_groups} groups cannot be picked "
                f"from {self.num_groups} groups of {group}"
            )
        if self.num_groups > 1 and group < self.group_scores:
            raise UnsupportedModelError(
                f"groups of {group} experts have no {self.group_scores} best scores"
            )

    @property
    def shared(self) -> MlpSpec | None:
        """The MLP that computes all rows."""
        if self.shared_size is None:
            return None
        return MlpSpec(size=self.shared_size, activation=self.activation, is_gated=self.is_gated)
