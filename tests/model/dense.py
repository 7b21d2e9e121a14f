"""A dense stand-in for the executor: whole requests, attended to at once, without a cache."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from legato.model.decoder import Decoder
from legato.model.model import Model
from legato.model.states import StateRun, StateShape, StepStates, make_states


class DenseAttention:
    """`StepAttention` over whole requests, packed one behind the other: no cache."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        # Key a layer, value its keys and values.
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        is_chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if key is None or value is None:
            key, value = self._written[layer]
        self._written[layer] = key, value
        group_size = query.shape[1] // key.shape[1]
        outputs = []
        for q, k, v in zip(
            *(rows.split(self.lengths) for rows in (query, key, value)), strict=True
        ):
            k, v = (rows.repeat_interleave(group_size, dim=1) for rows in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible(len(q), sliding_window, is_chunked), float("-inf"))
            if sinks is not None:
                last = sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)
                scores = torch.cat([scores, last], dim=-1)
            weights = scores.softmax(-1)[..., : len(k)].to(v.dtype)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)


def visible(num_tokens: int, window: int | None, is_chunked: bool = False) -> torch.Tensor:
    """[num_tokens queries, num_tokens keys] bool."""
    positions = torch.arange(num_tokens)
    age = positions[:, None] - positions[None, :]
    seen = age >= 0
    if window is None:
        return seen
    chunks = positions // window
    return seen & (chunks[:, None] == chunks if is_chunked else age < window)


def fresh_states(shapes: Sequence[StateShape], lengths: Sequence[int]) -> StepStates | None:
    """Return zero states for whole requests; None if the model has none."""
    if not shapes:
        return None
    layers = make_states(shapes, 1 + len(lengths), torch.float32, torch.device("cpu"))
    ends = list(accumulate(lengths))
    runs = [
        StateRun(e - n, e, 0, 0, 1 + i) for i, (e, n) in enumerate(zip(ends, lengths, strict=True))
    ]
    return StepStates(layers, runs)


@torch.inference_mode()
def packed_logits(model: Model, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [length, V] of each prompt, all computed in one step."""
    lengths = [len(prompt) for prompt in prompts]
    input_ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    states = fresh_states(model.spec.states, lengths) if isinstance(model, Decoder) else None
    hidden = model.forward(input_ids, positions, DenseAttention(lengths), states=states)
    return list(model.compute_logits(hidden).split(lengths))
