"""What the sampler needs to know of a row of logits."""

from dataclasses import dataclass

import torch

from legato.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request, about to get its next token.

    Attributes:
        params: of the request; `seed` is a number unless the request is greedy.
        eos_token_ids: tokens that end the request, beside `params.stop_token_ids`.
        prompt_token_ids: int64, on the CPU.
        output_token_ids: int64, on the CPU; all tokens sampled so far.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    prompt_token_ids: torch.Tensor
    output_token_ids: torch.Tensor

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)
