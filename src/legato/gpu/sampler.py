"""Sampling on the device: what a step says of its sampled rows, and the tokens that come of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from legato.core.sampling_params import SamplingParams
from legato.executor.adjustments import adjust_logits
from legato.executor.draw import halving_of, uniform_numbers
from legato.executor.sequence import SamplingRow
from legato.gpu.kernels.sampling import DRAWN, FAULTY, GREEDY, sample_rows

_ROW = np.dtype(
    [
        ("top_p", np.float64),
        ("halving", np.float32),
        ("lowest_score", np.float32),
        ("top_k", np.int32),
        ("kind", np.int32),
    ]
)
"""A request's settings, as `legato.gpu.kernels.sampling` wants them."""

NUM_WORDS = 8
"""int32 a sampled row takes in a step's inputs: two float64, then two float32 and two int32."""


@dataclass(frozen=True)
class SamplingInputs:
    """What the device reads of Q sampled rows: views of one part of a step's inputs."""

    uniforms: torch.Tensor
    top_ps: torch.Tensor
    halvings: torch.Tensor
    lowest_scores: torch.Tensor
    top_ks: torch.Tensor
    kinds: torch.Tensor

    @classmethod
    def of(cls, words: torch.Tensor) -> "SamplingInputs":
        """Args: words: int32 [NUM_WORDS * Q] that begin at a multiple of 8 bytes."""
        doubles, floats, integers = words.view(4, -1).split_with_sizes((2, 1, 1))
        return cls(
            *doubles.view(torch.float64).view(2, -1),
            *floats.view(torch.float32).view(2, -1),
            *integers.view(2, -1),
        )


class SamplingTable:
    """The settings of the requests that have slots, and their rows of a step's inputs."""

    def __init__(self, num_slots: int) -> None:
        self._settings = np.zeros(num_slots, dtype=_ROW)
        self._seeds = np.zeros(num_slots, dtype=np.int64)

    def put(self, slot: int, params: SamplingParams) -> None:
        """Take in the settings of the request that has `slot` from now on."""
        kind = GREEDY if params.is_greedy else DRAWN
        with np.errstate(divide="ignore"):
            lowest_score = np.log2(np.float32(params.min_p))
        halving = halving_of(params.temperature)
        self._settings[slot] = params.top_p, halving, lowest_score, max(params.top_k, 0), kind
        assert params.is_greedy or params.seed is not None, "the front end resolves seeds"
        self._seeds[slot] = params.seed or 0

    def write(
        self,
        out: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        num_output_tokens: npt.NDArray[np.int64],
    ) -> None:
        """Fill in what `SamplingInputs.of` reads; rows behind the last of `slots` are padding.

        Args:
            out: [NUM_WORDS * Q], beginning at a multiple of 8 bytes.
            slots: [at most Q], of each row's request.
            num_output_tokens: as many, those before the token to be sampled, known or not.
        """
        rows, settings = slice(len(slots)), self._settings[slots]
        out.fill(0)
        words = out.reshape(4, -1)
        doubles = words[:2].view(np.float64)
        floats = words[2].view(np.float32).reshape(2, -1)
        integers = words[3].reshape(2, -1)
        doubles[0, rows] = uniform_numbers(self._seeds[slots], num_output_tokens)
        doubles[1, rows] = settings["top_p"]
        floats[0, rows] = settings["halving"]
        floats[1, rows] = settings["lowest_score"]
        integers[0, rows] = settings["top_k"]
        integers[1, rows] = settings["kind"]


def sample(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    sample_slots: torch.Tensor,
    last_token: torch.Tensor,
    sampled: torch.Tensor,
    *,
    adjusted: torch.Tensor | None = None,
) -> None:
    """Choose the next token of each row, as `legato.executor.sampler.sample` does.

    Nothing here waits for the device.

    Args:
        logits: [Q, V], as the model gives them; not changed.
        sample_slots: int32 [Q], where in `last_token` a row's token goes.
        last_token: int32 [S + 1]; written.
        sampled: int32 [Q]; written but for padding. `check_sampled` says what may be in it.
        adjusted: [Q, V], what requests have made of `logits` (`adjust`); None where none asks.
    """
    sample_rows(
        logits if adjusted is None else adjusted,
        logits,
        inputs.kinds,
        inputs.halvings,
        inputs.top_ks,
        inputs.top_ps,
        inputs.lowest_scores,
        inputs.uniforms,
        sample_slots,
        last_token,
        sampled,
    )


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """A copy of `logits` [Q, V], the first rows of it changed as `rows` ask; float32 [Q, V]."""
    adjusted = logits.to(torch.float32, copy=True)
    adjust_logits(adjusted, rows)
    return adjusted


def check_sampled(sampled: npt.NDArray[np.int32]) -> None:
    """Raise `ValueError` where logits were not finite.

    Args:
        sampled: [S], without padding: tokens, or `NO_TOKEN` of `legato.executor.sampler`.
    """
    faulty = (sampled == FAULTY).nonzero()[0]
    if len(faulty):
        raise ValueError(f"logits of rows {faulty.tolist()} of {len(sampled)} are not finite")
