"""The distribution a row's token should have, written out plainly in float64."""

from typing import Any

import numpy as np

from legato.core.sampling_params import SamplingParams
from legato.executor.sequence import SamplingRow, TokenLimits


def make_row(
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    asked = SamplingParams(**{"seed": 0, **params})
    return SamplingRow(
        params=asked,
        eos_token_ids=eos,
        prompt_token_ids=np.array(prompt, dtype=np.int64),
        output_token_ids=np.array(output, dtype=np.int64),
        limits=TokenLimits.of(asked),
    )


def adjusted(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """[V] logits with bias, mask and penalties."""
    params, output = row.params, row.output_token_ids.tolist()
    values = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in row.eos_token_ids + params.stop_token_ids:
            values[token] = -np.inf
    values[forbidden(params, output, len(values))] = -np.inf
    for token in {*row.prompt_token_ids.tolist(), *output}:
        penalty = params.repetition_penalty
        values[token] *= penalty if values[token] < 0 else 1 / penalty
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return values


def forbidden(params: SamplingParams, output: list[int], vocab_size: int) -> list[int]:
    """Tokens that are not allowed, or would end the output with a bad word."""
    allowed = params.allowed_token_ids
    others = [] if allowed is None else sorted({*range(vocab_size)} - {*allowed})
    lasts = [
        last
        for *begun, last in params.bad_words_token_ids
        if output[len(output) - len(begun) :] == begun
    ]
    return others + lasts


def kept(values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool [V]: the tokens that min_p, top_k and top_p leave; equal ones share their fate."""
    probs = softmax(values / params.temperature)
    allowed = probs >= params.min_p * probs.max()
    if 0 < params.top_k < len(probs):
        allowed &= values >= np.sort(values)[-params.top_k]
    probs = np.where(allowed, probs, 0.0) / probs[allowed].sum()
    for level in sorted(set(values[allowed]), reverse=True):
        if probs[values >= level].sum() >= params.top_p:
            return allowed & (values >= level)
    return allowed


def distribution(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """[V] probabilities of a row that is not greedy."""
    values = adjusted(logits, row)
    return softmax(np.where(kept(values, row.params), values / row.params.temperature, -np.inf))


def softmax(values: np.ndarray) -> np.ndarray:
    exp = np.exp(values - values.max())
    return exp / exp.sum()
