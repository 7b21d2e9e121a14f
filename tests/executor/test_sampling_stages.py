"""Each sampling parameter changes what its stage computes; one without a value here fails."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from legato.core.sampling_params import STAGES, SamplingParams
from legato.core.structured_outputs import StructuredOutputs
from legato.executor.adjustments import LogitAdjuster, asks_for_change
from legato.executor.sampler import sample
from legato.executor.sequence import SamplingRow
from tests.executor.sampling_reference import make_row
from tests.executor.wider_params import WIDER

DRAW: dict[str, Any] = {"temperature": 9.0, "top_p": 0.3, "top_k": 2, "min_p": 0.9, "seed": 2**40}
LOGITS: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": (3, 4),
    "bad_words_token_ids": ((3,),),
    "min_tokens": 9,
    "structured_outputs": StructuredOutputs(regex="a"),
}
WITHOUT_VALUES = ("logit_bias", "allowed_token_ids", "min_tokens")
"""Their changes do not depend on the values of earlier tokens."""


def row_with(**params: Any) -> SamplingRow:
    row = make_row(prompt=(1, 2), output=(2, 5), eos=(0,), **params)
    if "structured_outputs" in params:
        return replace(row, mask=np.array([0b111], dtype=np.uint32))
    return row


@pytest.mark.parametrize("name", STAGES["logits"])
def test_a_parameter_changes_logits(name: str) -> None:
    row, logits = row_with(**{name: LOGITS[name]}), torch.linspace(1.0, 2.0, 12)[None]
    changed = logits.clone()
    LogitAdjuster().adjust(changed, [row])
    assert not torch.equal(changed, logits)
    assert asks_for_change(row)
    assert row.params.may_adjust_logits
    assert row.params.needs_values == (name not in WITHOUT_VALUES)


def test_without_parameters_nothing_changes_logits() -> None:
    for row in (row_with(), row_with(logit_bias={}, bad_words_token_ids=[])):
        assert not asks_for_change(row)
        assert not row.params.may_adjust_logits
        assert not row.params.needs_values


@pytest.mark.parametrize("name", STAGES["draw"])
def test_a_parameter_changes_the_draw(name: str) -> None:
    logits = torch.linspace(-2.0, 2.0, 12).repeat(500, 1)
    rows = [make_row(seed=seed) for seed in range(500)]
    other = [make_row(**{"seed": seed, name: DRAW[name]}) for seed in range(500)]
    assert not torch.equal(sample(logits, rows), sample(logits, other))


@pytest.mark.parametrize("params", WIDER)
def test_a_sampler_fails_until_it_reads_a_new_parameter(params: SamplingParams) -> None:
    row = replace(make_row(), params=params)
    with pytest.raises(ValueError, match="too many values"):
        sample(torch.zeros(1, 4), [row])
