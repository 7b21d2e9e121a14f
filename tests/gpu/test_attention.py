"""Attention of packed rows against float64, in caches whose other blocks are NaN."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.interpreter import GridExecutor

from legato.gpu.kernels import attention
from legato.gpu.kernels.attention import attend
from legato.gpu.kernels.attention_parts import make_scratch
from legato.gpu.work_items import (
    Tiling,
    TokenSpan,
    section_size,
    work_lists,
    write_work,
    written_counts,
)
from tests.gpu.host_twin import on_the_twin
from tests.gpu.numbers import DTYPES, assert_near, each_dtype
from tests.gpu.paged import PagedStep, numpy_section
from tests.profiles import examples

MIXED = [(1, 299), (1, 0), (1, 64), (3, 130), (40, 0), (37, 20), (1, 63)]
"""Decodes of several parts and of one, drafts, a prompt, and another one's chunk."""
LONG = (34, 1100)
"""A chunk of tiles whose keys are split."""


def _attend(
    step: PagedStep,
    *,
    num_processors: int = 12,
    has_chunks: bool = True,
    sliding_window: int | None = None,
    widest: int | None = None,
    has_wide: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Attention by the kernels: [P, H, D], where padding is -7.

    Args:
        options: of `attend`.
        widest: window of another layer, for which the items are made.
    """
    num_rows, num_heads, head_dim = step.query.shape
    device, num_kv_heads = step.query.device, step.key_cache.shape[1]
    tiling = Tiling(num_heads, num_kv_heads, num_processors, has_wide)
    shape = tiling.shape(num_rows, has_chunks=has_chunks)
    section = numpy_section(section_size(shape))
    write_work(section, shape, step.spans, widest if widest is not None else sliding_window)
    return attend(
        step.query,
        step.key_cache,
        step.value_cache,
        step.block_table,
        work_lists(torch.from_numpy(section).to(device), shape),
        torch.full_like(step.query, -7),
        make_scratch(shape, num_heads=num_heads, head_dim=head_dim, device=device),
        **{"scale": head_dim**-0.5, **options},
        sliding_window=sliding_window,
    )


def _check(step: PagedStep, out: torch.Tensor, sliding_window: int | None = None) -> None:
    expected = step.expected(step.query.shape[2] ** -0.5, sliding_window)
    assert_near(out[: len(expected)], expected, step.query.dtype)
    assert (out[len(expected) :] == -7).all()


def _mixed(
    device: torch.device,
    dtype: torch.dtype = DTYPES[0],
    *more: tuple[int, int],
    head_dim: int = 32,
    block_size: int = 16,
) -> PagedStep:
    return PagedStep.random(
        [*MIXED, *more],
        heads=(8, 2),
        head_dim=head_dim,
        block_size=block_size,
        num_padding=5,
        dtype=dtype,
        device=device,
    )


@each_dtype
def test_a_mixed_step(dtype: torch.dtype, device: torch.device) -> None:
    step = _mixed(device, dtype, LONG)
    _check(step, _attend(step))


def test_without_wide_items(device: torch.device) -> None:
    step = _mixed(device)
    _check(step, _attend(step, has_chunks=False))


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 1, 50, 150])
def test_blocks_that_hold_all_keys_of_a_product(
    sliding_window: int | None, is_quantized: bool, device: torch.device
) -> None:
    step = _mixed(device, torch.float16, LONG, block_size=64)
    if is_quantized:
        step = step.quantized()
    _check(step, _attend(step, sliding_window=sliding_window), sliding_window)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 64), (128, 128)])
def test_keys_loaded_as_tiles(
    head_dim: int, block_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Hopper, elsewhere too."""
    monkeypatch.setattr(attention, "multiplies_from_shared_memory", lambda: True)
    step = _mixed(device, torch.float16, LONG, head_dim=head_dim, block_size=block_size)
    _check(step, _attend(step))


@pytest.mark.parametrize("sliding_window", [1, 50])
def test_a_window(sliding_window: int, device: torch.device) -> None:
    step = _mixed(device)
    _check(step, _attend(step, sliding_window=sliding_window), sliding_window)


def test_a_window_in_a_model_whose_other_layers_see_more(device: torch.device) -> None:
    step = _mixed(device)
    _check(step, _attend(step, sliding_window=50, widest=10**6), 50)


@each_dtype
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_cap_a_scale_and_sinks(
    is_quantized: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Together with a window, in items whose keys are split and in others."""
    step = _mixed(device, dtype)
    if is_quantized:
        step = step.quantized()
    sinks = torch.linspace(-3, 4, 8, device=device)
    out = _attend(step, scale=0.7, softcap=3.0, sinks=sinks, sliding_window=150)
    expected = step.expected(0.7, 150, 3.0, sinks)
    assert_near(out[: len(expected)], expected, dtype)


@pytest.mark.parametrize("has_chunks", [False, True])
def test_a_head_without_a_key_worth_its_while_sees_the_sink(
    has_chunks: bool, device: torch.device
) -> None:
    """Its result is next to nothing; with a sink of no weight, it is as without one."""
    step = _mixed(device)
    sinks = torch.tensor([40.0, -1e30] * 4, device=device)
    out = _attend(step, has_chunks=has_chunks, sinks=sinks)
    plain = step.expected(32**-0.5, None)
    assert_near(out[: len(plain), 1::2], plain[:, 1::2], step.query.dtype)
    assert out[: len(plain), ::2].abs().max() < 1e-9


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [
        pytest.param((3, 1), 80, 64, id="a size and a group that are no powers of two"),
        pytest.param((2, 2), 16, 1, id="blocks of one token"),
        pytest.param((20, 1), 16, 48, id="a group of more than 16"),
    ],
)
def test_shapes_of_other_models(
    heads: tuple[int, int], head_dim: int, block_size: int, device: torch.device
) -> None:
    step = PagedStep.random(
        [(9, 40), (1, 200), (30, 0)],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32,
        device=device,
    )
    _check(step, _attend(step, num_processors=2))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((32, 8), 128), ((32, 8), 64), ((16, 8), 256), ((32, 32), 96)]
)
@each_dtype
def test_shapes_of_large_models(
    heads: tuple[int, int],
    head_dim: int,
    is_quantized: bool,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Their tiles fill registers and shared memory as no interpreter's do."""
    step = PagedStep.random(
        [(1, 4095), (1, 17), (5, 900), (300, 2000), (513, 0), *[(1, 1000)] * 60],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        num_padding=64,
        dtype=dtype,
        device=device,
    )
    if is_quantized:
        step = step.quantized()
    for sliding_window in (None, 700):
        out = _attend(
            step,
            num_processors=132,
            sliding_window=sliding_window,
            has_wide=dtype != torch.float32,  # as in steps
        )
        _check(step, out, sliding_window)


@on_the_twin
@pytest.mark.parametrize(
    ("rows", "has_chunks", "is_graph"),
    [
        pytest.param([(8192, 0)], True, False, id="a prompt"),
        pytest.param([(1, 1023)] * 128 + [(4096, 0)], True, False, id="decodes and a prompt"),
        pytest.param([(1, 1023)] * 128 + [(1920, 4096)], True, True, id="decodes and a chunk"),
        pytest.param([(1, 1023)] * 128, False, True, id="decodes"),
        pytest.param([(1, 8191)], False, True, id="a decode"),
    ],
)
def test_programs_have_items(
    rows: list[tuple[int, int]],
    has_chunks: bool,
    is_graph: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of Llama 3.1 8B on an H200; graphs have a few for each processor."""
    num_rows, (num_heads, num_kv_heads, head_dim) = sum(n for n, _ in rows), (32, 8, 128)
    shape = Tiling(num_heads, num_kv_heads, 132).shape(num_rows, has_chunks=has_chunks)
    section = numpy_section(section_size(shape))
    firsts = accumulate((count for count, _ in rows), initial=0)
    spans = [
        TokenSpan(slot, first, *span)
        for slot, (first, span) in enumerate(zip(firsts, rows, strict=False))
    ]
    write_work(section, shape, spans, None)
    counts = written_counts(section, shape)
    launched: list[int] = []

    def note(kernel: GridExecutor, *_: Any, **__: Any) -> None:
        launched.extend(kernel.grid)

    monkeypatch.setattr(GridExecutor, "__call__", note)
    query = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float16, device="meta")
    cache = torch.empty(64, num_kv_heads, 64, head_dim, dtype=torch.float16, device="meta")
    attend(
        query,
        cache,
        cache,
        torch.empty(len(rows), 256, dtype=torch.int32, device="meta"),
        work_lists(torch.from_numpy(section), shape, None if is_graph else counts),
        torch.empty_like(query),
        make_scratch(shape, num_heads=num_heads, head_dim=head_dim, device=query.device),
        scale=1.0,
        sliding_window=None,
    )
    needed = [
        number
        for num_items, num_merges in counts
        for number in (num_kv_heads * num_items, num_heads * num_merges)
    ]
    if is_graph:
        assert len(launched) == len(needed)
        assert max(launched) <= 13 * 132
    else:
        assert launched == [number for number in needed if number]


def test_a_quantized_cache(device: torch.device) -> None:
    step = _mixed(device).quantized()
    _check(step, _attend(step))


def test_small_values_in_8_bits(device: torch.device) -> None:
    """Scales that float16 hardly has."""
    step, small = _mixed(device, torch.float16), 2.0**-12
    values = [value * small for value in step.values]
    step = replace(step, values=values, value_cache=step.value_cache * small).quantized()
    expected = step.expected(32**-0.5, None) / small
    assert_near(_attend(step)[: len(expected)] / small, expected, torch.float16)


def test_a_row_is_the_same_whatever_is_beside_it(device: torch.device) -> None:
    """Bit by bit, as long as its keys are cut into the same parts."""
    step = _mixed(device)
    out = _attend(step, num_processors=1)
    alone = PagedStep(
        spans=step.spans[:3],
        query=step.query[:3].clone(),
        keys=step.keys[:3],
        values=step.values[:3],
        key_cache=step.key_cache,
        value_cache=step.value_cache,
        block_table=step.block_table,
    )
    assert torch.equal(_attend(alone, num_processors=1), out[:3])


def test_what_is_not_finite_shows_in_its_own_rows_alone(device: torch.device) -> None:
    step = _mixed(device)
    out = _attend(step)
    step.query[1] = torch.nan
    broken = _attend(step)
    assert broken[1].isnan().all()
    broken[1] = out[1]
    assert torch.equal(broken, out)


@given(
    rows=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 200)),
        min_size=1,
        max_size=5,
    ),
    heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    block_size=st.sampled_from([16, 32]),
    num_processors=st.sampled_from([1, 6]),
    sliding_window=st.sampled_from([None, 1, 33]),
    has_chunks=st.booleans(),
    seed=st.integers(0, 10),
)
@examples(12)
def test_any_step(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    num_processors: int,
    sliding_window: int | None,
    has_chunks: bool,
    seed: int,
    device: torch.device,
) -> None:
    step = PagedStep.random(
        rows,
        heads=heads,
        head_dim=32,
        block_size=block_size,
        dtype=torch.float32,
        device=device,
        seed=seed,
    )
    out = _attend(
        step, num_processors=num_processors, has_chunks=has_chunks, sliding_window=sliding_window
    )
    _check(step, out, sliding_window)
