"""Recurrent mixers against recurrences in float64, token by token, however a request is cut."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from legato.model import delta_net, mamba2
from legato.model.decoder_layer import make_recurrence
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec
from legato.model.native_kernels import NativeKernels
from legato.model.native_recurrence import NativeMixer
from legato.model.recurrence import RecurrentMixer
from legato.model.states import StateRun, StepStates, make_states
from tests.executor.instructions import TESTED
from tests.model.random_models import with_recurrence

CPU = torch.device("cpu")
HIDDEN, LENGTH = 64, 200
IMPLEMENTATIONS = ["torch", *TESTED]
RECURRENCES: dict[str, RecurrenceSpec] = {
    "short convolution": ShortConvSpec(num_channels=HIDDEN, kernel_size=3, has_bias=True),
    "delta net": DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=16, value_dim=32),
    "mamba 2": Mamba2Spec(num_heads=4, num_groups=2, head_dim=32, state_size=16),
    "mamba 2 with factors": Mamba2Spec(
        num_heads=4,
        num_groups=2,
        head_dim=32,
        state_size=16,
        norm="before_gate",
        scales=(1.5, 0.5, 0.75, 1.25, 0.8),
    ),
    "mamba 2 without a norm": Mamba2Spec(
        num_heads=4, num_groups=2, head_dim=32, state_size=16, norm=None
    ),
}


def mixer(
    own: RecurrenceSpec, implementation: str = "torch", *, num_threads: int = 2
) -> RecurrentMixer:
    """Make a mixer of random weights, its biases and gates among them.

    Args:
        implementation: "torch", or the instructions of native kernels.
    """
    spec = with_recurrence(own, hidden_size=HIDDEN)
    torch.manual_seed(0)
    module = make_recurrence(spec, 1, torch.empty)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.3 if parameter.dim() == 1 else 0.0, parameter.shape[-1] ** -0.5)
    if implementation != "torch":
        module.native = NativeMixer(module, NativeKernels(num_threads, implementation))
    return module


class Request:
    """A request whose rows go through a mixer. Attributes: slot: of its state; 0 is zero."""

    def __init__(self, own: RecurrenceSpec, implementation: str, rows: torch.Tensor) -> None:
        self.layers = make_states([own.state], 8, torch.float32, CPU)
        self.module = mixer(own, implementation)
        self.rows, self.slot, self.position = rows, 0, 0

    @torch.inference_mode()
    def advance(self, num_tokens: int) -> torch.Tensor:
        """Return the outputs of its next rows, beside rows of others and padding."""
        rows = self.rows[self.position : self.position + num_tokens]
        destination = 2 if self.slot == 3 else 3
        runs = [
            StateRun(0, 1, 9, 0, 5),
            StateRun(1, 1 + num_tokens, self.position, self.slot, destination),
            StateRun(1 + num_tokens, 4 + num_tokens, 3, 0, 6),
        ]
        other = torch.ones(1, HIDDEN), torch.ones(3, HIDDEN), torch.full((2, HIDDEN), torch.nan)
        packed = torch.cat((other[0], rows, *other[1:]))
        output: torch.Tensor = self.module(packed, StepStates(self.layers, runs))
        assert len(output) == len(packed)
        self.position += num_tokens
        self.slot = destination
        return output[1 : 1 + num_tokens]

    @property
    def state(self) -> list[torch.Tensor]:
        return [part[self.slot].clone() for part in self.layers[0] if len(part)]


def cut(
    own: RecurrenceSpec, implementation: str, rows: torch.Tensor, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Return the state after rows that are cut like this, and all outputs."""
    request = Request(own, implementation, rows)
    outputs = torch.cat([request.advance(size) for size in sizes])
    assert request.position == LENGTH
    return [outputs, *request.state]


CUTS = {
    "token by token": [1] * LENGTH,
    "at 7": [7] * 28 + [4],
    "anywhere": [1, 30, 2, 100, 1, 1, 65],
}
AT_64 = {"one by one": [64, 64, 64, 8], "two first": [128, 72], "two last": [64, 136]}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_cuts_change_nothing_beyond_rounding(name: str, implementation: str) -> None:
    own, rows = RECURRENCES[name], torch.randn(LENGTH, HIDDEN)
    whole = cut(own, implementation, rows, [LENGTH])
    for sizes in CUTS.values():
        for part, expected in zip(cut(own, implementation, rows, sizes), whole, strict=True):
            assert part.isfinite().all()
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_the_state_is_bitwise_the_same_for_cuts_at_multiples_of_64(
    name: str, implementation: str
) -> None:
    """The mixer's projections may round differently by their number of rows, so they are exact."""
    own, rows = RECURRENCES[name], torch.randn(LENGTH, HIDDEN).mul(8).round()
    exact = Request.__init__

    def integers(
        request: Request, own: RecurrenceSpec, implementation: str, rows: torch.Tensor
    ) -> None:
        exact(request, own, implementation, rows)
        for parameter_name, parameter in request.module.named_parameters():
            if "in_proj" in parameter_name:
                parameter.copy_(parameter.mul(16).round() / 64)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Request, "__init__", integers)
        whole = cut(own, implementation, rows, [LENGTH])
        for sizes in AT_64.values():
            _, *states = cut(own, implementation, rows, sizes)
            assert all(map(torch.equal, states, whole[1:]))


def delta_rule(
    value: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule as its paper has it; `state` [H, K, V] is advanced."""
    outputs = torch.zeros_like(value)
    for t, h in product(range(len(value)), range(value.shape[1])):
        state[h] *= gate[t, h].exp()
        error = value[t, h] - state[h].T @ key[t, h]
        state[h] += beta[t, h] * torch.outer(key[t, h], error)
        outputs[t, h] = state[h].T @ query[t, h]
    return outputs


def state_space(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, gate: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Mamba-2 as its paper has it; `state` [H, P, N] is advanced."""
    outputs = torch.zeros_like(x)
    for t, h in product(range(len(x)), range(x.shape[1])):
        state[h] = gate[t, h].exp() * state[h] + torch.outer(x[t, h], b[t, h])
        outputs[t, h] = state[h] @ c[t, h]
    return outputs


Form = Callable[..., torch.Tensor]


def by_token(form: Form) -> Form:
    """Return a chunk form that takes one token after the other."""

    def chunk(*arguments: torch.Tensor) -> torch.Tensor:
        *rows, state = arguments
        tokens = range(len(rows[0]))
        return torch.cat([form(*(part[t, None] for part in rows), state[None]) for t in tokens])

    return chunk


FORMS: dict[str, tuple[Form, Form]] = {
    "delta net by token": (by_token(delta_net.token_form), delta_rule),
    "delta net in chunks": (delta_net.chunk_form, delta_rule),
    "mamba 2 by token": (by_token(mamba2.token_form), state_space),
    "mamba 2 in chunks": (mamba2.chunk_form, state_space),
}
"""Key a name, value a form and the recurrence that it computes."""


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 17, 64])
def test_both_forms_are_the_recurrence_in_float64(name: str, num_tokens: int) -> None:
    form, recurrence = FORMS[name]
    torch.manual_seed(num_tokens)
    value, query, key = (torch.randn(num_tokens, 3, size) for size in (8, 16, 16))
    # Gates from none to ones that forget everything.
    rows = [value, query, F.normalize(key, dim=-1), -torch.randn(num_tokens, 3).mul(3).exp()]
    state = torch.randn(3, 8, 16)
    if recurrence is delta_rule:
        rows.append(torch.rand(num_tokens, 3))
        state = state.mT.contiguous()
    exact = state.double()
    expected = recurrence(*(part.double() for part in rows), exact)
    output = form(*rows, state)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), exact, rtol=1e-5, atol=1e-5)
