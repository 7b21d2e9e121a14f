"""Tokens from the device against those of `legato.executor.sampler`, which has its own proofs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.sampling_params import STAGES, SamplingParams
from legato.executor.sampler import NO_TOKEN
from legato.executor.sampler import sample as sample_on_host
from legato.executor.sequence import SamplingRow
from tests.executor.sampling_reference import make_row
from tests.executor.wider_params import WIDER
from tests.gpu.numbers import each_dtype
from tests.profiles import examples

INF = float("inf")
_PADDING = 2


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [S], and `last_token` where row i has slot i; both on the host."""
    from legato.executor.adjustments import LogitAdjuster
    from legato.gpu.sampler import NUM_WORDS, SamplingInputs, SamplingTable
    from legato.gpu.sampler import sample as sample_on_device

    num_rows = len(rows)
    table = SamplingTable(num_rows)
    for slot, row in enumerate(rows):
        table.put(slot, row.params)
    words = np.full(NUM_WORDS * (num_rows + _PADDING), -5, dtype=np.int32)
    num_output_tokens = np.array([row.num_output_tokens for row in rows])
    table.write(words, np.arange(num_rows, dtype=np.int32), num_output_tokens)
    slots = torch.full((num_rows + _PADDING,), num_rows, dtype=torch.int32)
    slots[:num_rows] = torch.arange(num_rows)
    last_token = torch.full((num_rows + 1,), -5, dtype=torch.int32, device=device)
    sampled = torch.full((num_rows + _PADDING,), -5, dtype=torch.int32, device=device)
    given = torch.cat([logits, torch.full_like(logits[:1], np.nan).repeat(_PADDING, 1)]).to(device)
    adjusted = given.to(torch.float32, copy=True)
    LogitAdjuster(lambda values: torch.from_numpy(values).to(given.device)).adjust(adjusted, rows)
    sample_on_device(
        given,
        SamplingInputs.of(torch.from_numpy(words).to(device)),
        slots.to(device),
        last_token,
        sampled,
        adjusted=adjusted if any(row.params.logit_bias for row in rows) else None,
    )
    assert (sampled[num_rows:] == -5).all(), "padding was written"
    return sampled[:num_rows].cpu(), last_token[:num_rows].cpu()


@st.composite
def params(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "temperature": draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.0, 5.0, 30.0, 1e30])),
        "top_k": draw(st.sampled_from([0, 0, 1, 3, 60, 10_000])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.99])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "output": (0,) * draw(st.integers(0, 3)),
    }


@st.composite
def ties(draw: st.DrawFn) -> tuple[torch.Tensor, list[SamplingRow]]:
    """A few rows of whole numbers, among which ties are common, and values of the extremes."""
    rows = [make_row(**one) for one in draw(st.lists(params(), min_size=1, max_size=4))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1, 40, 301]))
    logits = (torch.randn(len(rows), size, generator=generator) * 4).round()
    logits[:, 1:][torch.rand(len(rows), size - 1, generator=generator) < 0.1] = -INF
    return logits, rows


@examples(12)
@given(ties())
def test_tokens_are_those_of_the_host(
    device: torch.device, case: tuple[torch.Tensor, list[SamplingRow]]
) -> None:
    tokens, last_token = sample(*case, device)
    assert tokens.tolist() == sample_on_host(*case).tolist()
    assert last_token.tolist() == tokens.tolist()


MANY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"temperature": 40.0, "top_p": 0.9},
    {"temperature": 40.0, "top_k": 5000, "min_p": 0.3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 9_000, "top_p": 0.999999},
]
"""Some rows keep more tokens than are gathered: all are then looked at."""


@each_dtype
def test_a_vocabulary_of_several_tiles(device: torch.device, dtype: torch.dtype) -> None:
    rows = [make_row(**settings, seed=i) for i, settings in enumerate(MANY)]
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(len(rows), 9_100, generator=generator) * 3).to(dtype)
    logits[0, 7::4096] = 20.0  # the likeliest are on one lane of several tiles
    assert sample(logits, rows, device)[0].tolist() == sample_on_host(logits.float(), rows).tolist()


def test_likely_tokens_that_share_a_lane_are_all_looked_at(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than a lane has room for; of ten, the ninth best is the first that is kept."""
    logits = torch.full((1, 10 * 4096), -30.0)
    logits[0, 7::4096] = torch.arange(10.0) / 10
    fix_uniforms(monkeypatch, 0.0)
    assert sample(logits, [make_row(top_k=9)], device)[0].tolist() == [7 + 4096]


def test_unlikely_tokens_are_looked_at_if_a_filter_keeps_some(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of them outweigh the likeliest, and top_k leaves only four of these."""
    logits = torch.linspace(-9.0, -9.1, 9_000)[None].clone()
    logits[0, 0] = 0.0
    fix_uniforms(monkeypatch, 0.9)
    assert sample(logits, [make_row(top_k=5)], device)[0].tolist() == [0]
    assert sample(logits, [make_row()], device)[0].item() > 0


def test_the_borders_between_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest random number get the first and the last token with a weight."""
    logits = torch.tensor([[-200.0, 0.0, -1.0, -200.0, 1.0, -200.0]])
    for number, token in ((0.0, 1), (1.0 - 2.0**-53, 4)):
        fix_uniforms(monkeypatch, number)
        assert sample(logits, [make_row(seed=1)], device)[0].tolist() == [token]


def fix_uniforms(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    from legato.gpu import sampler

    monkeypatch.setattr(sampler, "uniform_numbers", lambda seeds, _: np.full(len(seeds), number))


@pytest.mark.parametrize("params", WIDER)
def test_the_table_fails_until_it_reads_a_new_parameter(params: SamplingParams) -> None:
    from legato.gpu.sampler import SamplingTable

    with pytest.raises(ValueError, match="too many values"):
        SamplingTable(1).put(0, params)


@pytest.mark.parametrize("name", STAGES["draw"])
def test_the_table_reads_a_parameter(name: str) -> None:
    from legato.gpu.sampler import NUM_WORDS, SamplingTable

    table, words = SamplingTable(2), np.zeros((2, NUM_WORDS), dtype=np.int32)
    changed = {"temperature": 9.0, "top_p": 0.3, "top_k": 2, "min_p": 0.9, "seed": 5}[name]
    for slot, params in enumerate(({"seed": 0}, {"seed": 0, name: changed})):
        table.put(slot, SamplingParams(**params))
        table.write(words[slot], np.array([slot], dtype=np.int32), np.zeros(1, dtype=np.int64))
    assert (words[0] != words[1]).any()


def test_a_row_whose_settings_forbid_all_tokens_has_none(device: torch.device) -> None:
    rows = [make_row(allowed_token_ids=(1,), logit_bias={1: -100.0}), make_row(logit_bias={0: 1.0})]
    logits = torch.tensor([[0.0, -INF, 2.0], [5.0, -INF, -INF]])
    tokens, last_token = sample(logits, rows, device)
    assert tokens.tolist() == [NO_TOKEN, 0]
    assert last_token.tolist() == [0, 0]  # to be looked up in the next step in any case


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [0.0, np.nan], [INF, 0.0], [-INF, -INF]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told_of(
    device: torch.device, bad: list[float], temperature: float
) -> None:
    from legato.gpu.sampler import check_sampled

    rows = [make_row(temperature=temperature), make_row(temperature=temperature)]
    tokens, last_token = sample(torch.tensor([[0.0, -INF], bad]), rows, device)
    assert tokens[0] == 0
    assert last_token.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"logits of rows \[1\] of 2 are not finite"):
        check_sampled(tokens.numpy())
