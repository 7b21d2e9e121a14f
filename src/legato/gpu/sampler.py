"""Samples on the device: the inputs of sampled rows, and their tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from legato.core.sampling_params import SamplingParams
from legato.executor.draw import halving_of, uniform_numbers
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
"""A request's settings, as in `legato.gpu.kernels.sampling`."""

NUM_WORDS = 8
"""int32 of a sampled row in a step's inputs: two float64, then two float32 and two int32."""


@dataclass(frozen=True)
class SamplingInputs:
    """The device's inputs for Q sampled rows: views of one part of a step's inputs."""

    uniforms: torch.Tensor
    top_ps: torch.Tensor
    halvings: torch.Tensor
    lowest_scores: torch.Tensor
    top_ks: torch.Tensor
    kinds: torch.Tensor

    @classmethod
    def of(cls, words: torch.Tensor) -> "SamplingInputs":
        """Args: words: int32 [NUM_WORDS * Q], starting at a multiple of 8 bytes."""
        doubles, floats, integers = words.view(4, -1).split_with_sizes((2, 1, 1))
        return cls(
            *doubles.view(torch.float64).view(2, -1),
            *floats.view(torch.float32).view(2, -1),
            *integers.view(2, -1),
        )


class SamplingTable:
    """Settings of the requests with slots, and their rows in a step's inputs."""

    def __init__(self, num_slots: int) -> None:
        self._settings = np.zeros(num_slots, dtype=_ROW)
        self._seeds = np.zeros(num_slots, dtype=np.int64)

    def put(self, slot: int, params: SamplingParams) -> None:
        """Store the settings of the new request in `slot`."""
        temperature, (top_p, top_k, min_p), seed = params.draw
        kind = GREEDY if params.is_greedy else DRAWN
        with np.errstate(divide="ignore"):
            lowest_score = np.log2(np.float32(min_p))
        halving = halving_of(temperature)
        self._settings[slot] = top_p, halving, lowest_score, max(top_k, 0), kind
        assert params.is_greedy or seed is not None, "the front end resolves seeds"
        self._seeds[slot] = seed or 0

    def write(
        self,
        out: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        num_output_tokens: npt.NDArray[np.int64],
    ) -> None:
        """Write the inputs for `SamplingInputs.of`; rows after the last of `slots` are padding.

        Args:
            out: [NUM_WORDS * Q], starting at a multiple of 8 bytes.
            slots: [at most Q], of each row's request.
            num_output_tokens: of each row, tokens before the sampled one, known or not.
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
    """Sample the next token of each row, as `legato.executor.sampler.sample` does.

    Nothing here waits for the device.

    Args:
        logits: [Q, V], from the model; not changed.
        sample_slots: int32 [Q], index in `last_token` of a row's token.
        last_token: int32 [S + 1]; written.
        sampled: int32 [Q]; written except for padding. `check_sampled` lists its values.
        adjusted: [Q, V], the logits after adjustments; None without any.
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


def check_sampled(sampled: npt.NDArray[np.int32]) -> None:
    """Raise `ValueError` if any row's logits were not finite.

    Args:
        sampled: [S], without padding: tokens, or `NO_TOKEN` of `legato.executor.sampler`.
    """
    faulty = (sampled == FAULTY).nonzero()[0]
    if len(faulty):
        raise ValueError(f"logits of rows {faulty.tolist()} of {len(sampled)} are not finite")
