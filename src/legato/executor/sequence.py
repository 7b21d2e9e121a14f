"""What the executor remembers of a request between steps."""

import torch

from legato.core.request import AddRequest
from legato.executor.sampling_row import SamplingRow
from legato.kv.block_pool import runs_of


class SequenceState:
    """Tokens of one request, and where its blocks lie.

    Attributes:
        token_ids: int64 [capacity], the first `num_tokens` of which are known; on the CPU.
        num_prompt_logprobs: prompt tokens whose log probabilities were already returned, which a
            recomputation after preemption must not return again.
    """

    def __init__(self, message: AddRequest) -> None:
        prompt = message.prompt_token_ids
        assert message.params.max_tokens is not None
        self.message = message
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.token_ids = torch.empty(len(prompt) + message.params.max_tokens, dtype=torch.int64)
        self.token_ids[: len(prompt)] = torch.frombuffer(prompt, dtype=torch.int32)
        self.num_prompt_logprobs = 0
        self._block_ids: tuple[int, ...] = ()
        self._runs: list[tuple[int, int]] = []

    def append(self, token_id: int) -> None:
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def sampling_row(self) -> SamplingRow:
        return SamplingRow(
            params=self.message.params,
            eos_token_ids=self.message.eos_token_ids,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            output_token_ids=self.token_ids[self.num_prompt_tokens : self.num_tokens],
        )

    def block_runs(self, block_ids: tuple[int, ...]) -> list[tuple[int, int]]:
        """Runs [start, end) of adjacent blocks; remembered, since tables change every few steps."""
        if block_ids is not self._block_ids:
            self._block_ids = block_ids
            self._runs = list(runs_of(block_ids))
        return self._runs
