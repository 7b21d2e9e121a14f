"""Fits a workload into a model's context."""

from typing import Literal

import msgspec

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import Workload, WorkloadRequest, cut_to

TooLongAction = Literal["refuse", "cut", "drop"]


class TooLong(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of a workload that was made to fit.

    Attributes:
        max_model_len: the context: prompt plus output in tokens.
        num_requests: before.
        num_cut: shortened, the prompt first.
        num_dropped: left out.
        share_of_tokens: missing share of all prompts' tokens.
    """

    max_model_len: int
    num_requests: int
    num_cut: int = 0
    num_dropped: int = 0
    share_of_tokens: float

    def __str__(self) -> str:
        what = f"{self.num_dropped} dropped" if self.num_dropped else f"{self.num_cut} cut"
        return (
            f"of {self.num_requests} requests, {what} for a context of {self.max_model_len} "
            f"tokens: {self.share_of_tokens:.1%} of the prompt tokens are missing"
        )


def fit_into(
    workload: Workload, max_model_len: int, action: TooLongAction
) -> tuple[Workload, TooLong | None]:
    """Fit a workload into a context; return it and what it lost, if anything.

    Args:
        max_model_len: longest prompt plus output in tokens, at least 2.

    Raises:
        ConfigError: it does not fit and must be refused, or no request fits.
    """
    lengths = list(map(_length, workload))
    num_too_long = sum(length > max_model_len for length in lengths)
    if not num_too_long:
        return workload, None
    if action == "refuse":
        raise ConfigError(
            f"{num_too_long} of {len(workload)} requests are longer than the context of "
            f"{max_model_len} tokens, the longest has {max(lengths)}: --too-long cut shortens "
            "their prompts, --too-long drop leaves them out"
        )
    if action == "cut":
        fitting, counts = cut_to(workload, max_model_len), {"num_cut": num_too_long}
    else:
        fitting = [request for request in workload if _length(request) <= max_model_len]
        counts = {"num_dropped": num_too_long}
    if not fitting:
        raise ConfigError(f"no request fits into the context of {max_model_len} tokens")
    missing = 1.0 - _num_prompt_tokens(fitting) / _num_prompt_tokens(workload)
    return fitting, TooLong(
        max_model_len=max_model_len,
        num_requests=len(workload),
        share_of_tokens=missing,
        **counts,
    )


def _length(request: WorkloadRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens


def _num_prompt_tokens(workload: Workload) -> int:
    return sum(request.num_prompt_tokens for request in workload)
