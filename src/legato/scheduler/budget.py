"""How much work one step may hold."""

from typing import Protocol


class StepShape:
    """What is in a step so far; the features that a step's duration depends on."""

    __slots__ = ("num_decode_rows", "num_prefill_tokens")

    def __init__(self) -> None:
        self.num_decode_rows = 0
        self.num_prefill_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens


class StepBudget(Protocol):
    """Decides the size of a prefill chunk from what is in the step already."""

    def max_chunk(self, shape: StepShape, start: int) -> int:
        """Most prefill tokens that a chunk beginning at position `start` may bring; 0 for none."""
        ...

    def is_exceeded(self, shape: StepShape) -> bool:
        """Whether the step is over budget, as one with many decodes can be."""
        ...


class TokenBudget:
    """A fixed number of tokens a step, as in Sarathi-Serve (Agrawal et al., OSDI 2024)."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens

    def max_chunk(self, shape: StepShape, start: int) -> int:  # noqa: ARG002
        # Decodes alone may exceed the budget; prefill is then nothing, never negative.
        return max(0, self.max_num_batched_tokens - shape.num_tokens)

    def is_exceeded(self, shape: StepShape) -> bool:
        return shape.num_tokens > self.max_num_batched_tokens
