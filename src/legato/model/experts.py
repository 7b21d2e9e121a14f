"""Mixtures of experts on packed rows: a router, and the experts that it picks for each row.

Rows are sorted by expert, so that the weights of each picked expert are read once. A row's outputs
are added in the order of its experts' scores, which does not depend on the other rows.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from legato.model.communicator import Communicator
from legato.model.linear import Linear, MakeEmpty, make_norm
from legato.model.mlp import make_activation, make_dense_mlp
from legato.model.mlp_spec import MoeSpec
from legato.model.spec import DecoderSpec

EXPERT_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""Key a matrix that kernels take of a gated expert, value the names of its parts."""


class ExpertRouter(nn.Module):
    """Picks experts for each row, and their weights.

    Attributes:
        selection_bias: [num_experts] float32, on the scores while experts are picked.
        expert_scale: [num_experts] float32, factors on the weights.
    """

    def __init__(self, spec: MoeSpec, hidden_size: int, empty: MakeEmpty) -> None:
        super().__init__()
        self.spec = spec
        num_experts = spec.num_experts
        # In float32: a logit's rounding may pick another expert.
        self.weight = nn.Parameter(empty(num_experts, hidden_size).float(), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if spec.has_router_bias:
            self.bias = nn.Parameter(empty(num_experts).float(), requires_grad=False)
        self.selection_bias: nn.Parameter | None = None
        if spec.has_selection_bias:
            self.selection_bias = nn.Parameter(empty(num_experts).float(), requires_grad=False)
        self.expert_scale: nn.Parameter | None = None
        if spec.has_expert_scale:
            self.expert_scale = nn.Parameter(empty(num_experts).float(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts [T, A] int64 and their weights [T, A] float32 of rows [T, E].

        The best expert comes first; of experts with the same score, the first one.
        """
        spec = self.spec
        logits = F.linear(hidden.float(), self.weight)
        if self.bias is not None:
            logits = logits + self.bias
        scores = logits
        if spec.score != "softmax_of_active":
            scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        if spec.num_groups > 1:
            choice = self._in_best_groups(choice)
        experts = _best(choice, spec.num_active)
        weights = scores.gather(1, experts)
        if spec.score == "softmax_of_active":
            weights = weights.softmax(-1)
        elif spec.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts]
        return experts, weights * spec.factor

    def _in_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Return the scores with those outside of the best groups at minus infinity."""
        groups = choice.view(len(choice), self.spec.num_groups, -1)
        best = groups.topk(self.spec.group_scores, dim=-1).values.sum(-1)
        hidden = torch.ones_like(best, dtype=torch.bool)
        hidden.scatter_(1, _best(best, self.spec.num_active_groups), False)
        masked: torch.Tensor = groups.masked_fill(hidden[..., None], -torch.inf)
        return masked.flatten(1)


class Experts(nn.Module):
    """The MLPs among which a router picks, one weight for all of a kind.

    Attributes:
        gate_up_proj: gates and the other projections; of MLPs without gates, the latter alone.
        parts: their names in checkpoints.
    """

    def __init__(self, spec: MoeSpec, hidden_size: int, empty: MakeEmpty) -> None:
        super().__init__()
        count, size = spec.num_experts, spec.size
        self.activation = spec.activation
        self.act_fn = make_activation(spec.activation, empty)
        self.gate_limit, self.gate_slope = spec.gate_limit, spec.gate_slope
        self.parts = EXPERT_PARTS["gate_up"] if spec.is_gated else ("up_proj",)
        num_rows = len(self.parts) * size
        self.gate_up_proj = nn.Parameter(empty(count, num_rows, hidden_size), requires_grad=False)
        self.down_proj = nn.Parameter(empty(count, hidden_size, size), requires_grad=False)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if spec.has_bias:
            self.gate_up_bias = nn.Parameter(empty(count, num_rows), requires_grad=False)
            self.down_bias = nn.Parameter(empty(count, hidden_size), requires_grad=False)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Map rows [N, E], sorted by expert, to [N, E].

        Args:
            counts: rows of each expert.
        """
        parts = torch.split(rows, counts)
        return torch.cat([self._of(i, part) for i, part in enumerate(parts) if len(part)])

    def _of(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        biases = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        *gates, up = F.linear(rows, self.gate_up_proj[expert], biases).chunk(
            len(self.parts), dim=-1
        )
        if not gates:
            inner = self.act_fn(up)
        elif self.gate_limit is None:
            inner = self.act_fn(gates[0]).mul_(up)
        else:
            gate = gates[0].clamp(max=self.gate_limit)
            up = up.clamp(-self.gate_limit, self.gate_limit)
            inner = (up + 1) * gate * torch.sigmoid(self.gate_slope * gate)
        biases = None if self.down_bias is None else self.down_bias[expert]
        return F.linear(inner, self.down_proj[expert], biases)

    def checkpoint_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the destination of each expert's weights, with its name in checkpoints."""
        for kind, gates_ups, downs in (
            ("weight", self.gate_up_proj, self.down_proj),
            ("bias", self.gate_up_bias, self.down_bias),
        ):
            if gates_ups is None or downs is None:
                continue
            for expert, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
                for name, part in zip(self.parts, gate_up.chunk(len(self.parts)), strict=True):
                    yield f"{prefix}.{expert}.{name}.{kind}", part
                yield f"{prefix}.{expert}.down_proj.{kind}", down


class MixtureOfExperts(nn.Module):
    """A feed-forward network of experts, and perhaps of an MLP for all rows."""

    def __init__(self, spec: MoeSpec, hidden_size: int, empty: MakeEmpty) -> None:
        super().__init__()
        self.gate = ExpertRouter(spec, hidden_size, empty)
        self.experts = Experts(spec, spec.latent_size or hidden_size, empty)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if spec.latent_size is not None:
            self.fc1_latent_proj = Linear(hidden_size, spec.latent_size, False, empty)
            self.fc2_latent_proj = Linear(spec.latent_size, hidden_size, False, empty)
        self.shared_expert = (
            make_dense_mlp(spec.shared, hidden_size, empty) if spec.shared else None
        )
        self.shared_expert_gate: Linear | None = None
        if spec.has_shared_gate:
            self.shared_expert_gate = Linear(hidden_size, 1, False, empty)

    def forward(self, hidden: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Map [T, E] to [T, E].

        Args:
            routed: [T, E], what the router reads; None for `hidden`.
        """
        picked, weights = self.gate(hidden if routed is None else routed)  # [T, A]
        order = picked.flatten().argsort(stable=True)  # of pairs of a row and an expert, by expert
        counts = picked.flatten().bincount(minlength=self.gate.spec.num_experts).tolist()
        rows = hidden if self.fc1_latent_proj is None else self.fc1_latent_proj(hidden)
        rows = rows[order // picked.shape[1]]
        if self.gate.spec.scales_input:
            rows = (rows.float() * weights.flatten()[order, None]).to(rows.dtype)
            weights = torch.ones_like(weights)
        outputs = self.experts(rows, counts)
        by_row = torch.empty_like(outputs)
        by_row[order] = outputs
        total: torch.Tensor = (by_row.view(*picked.shape, -1).float() * weights[..., None]).sum(1)
        if self.fc2_latent_proj is not None:
            total = self.fc2_latent_proj(total.to(hidden.dtype)).float()
        if self.shared_expert is not None:
            shared = self.shared_expert(hidden).float()
            if self.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(self.shared_expert_gate(hidden).float())
            total = total + shared
        return total.to(hidden.dtype)


class MixtureBesideMlp(nn.Module):
    """Experts beside an MLP: they read the same residual stream, and their outputs are added.

    Args:
        communicator: sums the ranks' parts of the experts' outputs.
    """

    def __init__(
        self, own: MoeSpec, spec: DecoderSpec, empty: MakeEmpty, communicator: Communicator
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._router_scale = spec.hidden_size**-0.5
        self.router_norm = make_norm(spec, empty)
        self.input_norm = make_norm(spec, empty)
        self.mlp = MixtureOfExperts(own, spec.hidden_size, empty)
        self.output_norm = make_norm(spec, empty)
        self.mlp_output_norm = make_norm(spec, empty)

    def forward(self, hidden: torch.Tensor, mlp_output: torch.Tensor) -> torch.Tensor:
        """Map the residual stream [T, E] and the MLP's output [T, E] to the sum of both."""
        return self.added(self.mlp, hidden, mlp_output)

    def added(
        self,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        mlp_output: torch.Tensor,
    ) -> torch.Tensor:
        """Do what `forward` does, with another implementation of the experts.

        Args:
            experts: maps rows [T, E] and the router's rows [T, E] to [T, E].
        """
        routed = self.router_norm(hidden) * self._router_scale
        output = self._communicator.sum(experts(self.input_norm(hidden), routed))
        total: torch.Tensor = self.mlp_output_norm(mlp_output) + self.output_norm(output)
        return total


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [T, count] of the largest scores, the first ones of equal scores."""
    best: torch.Tensor = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return best
