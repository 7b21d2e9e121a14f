"""The work that a step cannot do without, by hand."""

import pytest

from legato_lab.work import MeasuredRates, Work, operators_of, work_of
from tests.executor.test_native import decoder_spec
from tests.scheduler.step_times import step_shape

SPEC = decoder_spec()
LAYERS = 2 * (64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 3 * 64 * 96)
HEAD = 100 * 64
KEY_VALUES = 2 * 2 * 2 * 32  # of a token: layers, keys and values, heads, values


def test_a_decode_reads_the_weights_and_its_keys() -> None:
    work = work_of(
        SPEC, step_shape(num_decodes=3, context=50), token_bytes=2 * KEY_VALUES, weight_bytes=1000
    )
    assert work.num_bytes == pytest.approx(1000 + 2 * KEY_VALUES * 150)
    assert work.num_flops == 2 * 3 * (LAYERS + HEAD) + 4 * 2 * 4 * 32 * 150


def test_a_chunk_sees_what_is_before_each_of_its_tokens() -> None:
    work = work_of(
        SPEC, step_shape(chunk=3, start=10), token_bytes=2 * KEY_VALUES, weight_bytes=1000
    )
    layers_share = LAYERS / (LAYERS + HEAD)  # no row has logits
    assert work.num_bytes == pytest.approx(1000 * layers_share + 2 * KEY_VALUES * 13)
    assert work.num_flops == 2 * 3 * LAYERS + 4 * 2 * 4 * 32 * (11 + 12 + 13)


def test_a_step_takes_the_longer_of_reading_and_multiplying() -> None:
    roofline = MeasuredRates(10.0, 50.0).or_faster(MeasuredRates(5.0, 100.0))
    assert roofline.least_s(Work(num_bytes=20.0, num_flops=100.0)) == 2.0
    assert roofline.least_s(Work(num_bytes=20.0, num_flops=500.0)) == 5.0


LLAMA_8B = decoder_spec(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    sliding_windows=(None,) * 32,
    tie_word_embeddings=False,
)
H100 = MeasuredRates(bytes_a_s=3.0e12, flops_a_s=798e12)
TOKEN_BYTES, WEIGHT_BYTES = 131_072, 15_009_841_152


@pytest.mark.parametrize(
    ("num_streams", "least_s"), [(1, 5.05e-3), (32, 6.43e-3), (128, 10.7e-3), (256, 16.5e-3)]
)
def test_decoding_an_8b_model_is_reading(num_streams: int, least_s: float) -> None:
    shape = step_shape(num_decodes=num_streams, context=1024)
    operators = operators_of(LLAMA_8B, shape, token_bytes=TOKEN_BYTES, weight_bytes=WEIGHT_BYTES)
    work = work_of(LLAMA_8B, shape, token_bytes=TOKEN_BYTES, weight_bytes=WEIGHT_BYTES)
    assert H100.least_s(work) == pytest.approx(least_s, rel=0.01)
    assert H100.operators_s(operators) == pytest.approx(least_s, rel=0.01)


def test_operators_of_a_mixed_step_take_longer_than_its_total() -> None:
    shape = step_shape(num_decodes=128, context=1024, chunk=512, start=4096)
    operators = operators_of(LLAMA_8B, shape, token_bytes=TOKEN_BYTES, weight_bytes=WEIGHT_BYTES)
    total = work_of(LLAMA_8B, shape, token_bytes=TOKEN_BYTES, weight_bytes=WEIGHT_BYTES)
    assert operators.keys() >= {"attention of decodes", "attention of chunks", "logits"}
    assert H100.operators_s(operators) == pytest.approx(18.7e-3, rel=0.01)
    assert H100.operators_s(operators) / H100.least_s(total) > 1.3


def test_a_prompt_of_an_8b_model_is_multiplying() -> None:
    shape = step_shape(chunk=8192, samples=True)
    operators = operators_of(LLAMA_8B, shape, token_bytes=TOKEN_BYTES, weight_bytes=WEIGHT_BYTES)
    assert 8192 / H100.operators_s(operators) == pytest.approx(49_400, rel=0.01)


def test_drafts_of_an_8b_model_are_multiplied_but_not_read() -> None:
    """Seven behind each of 32 streams: 224 rows more, keys of their own, and no weights."""
    plain = step_shape(num_decodes=32, context=1024)
    drafting = plain.copy()
    for _ in range(32):
        drafting.add_drafts(1024, 7)
    sizes = {"token_bytes": TOKEN_BYTES, "weight_bytes": WEIGHT_BYTES}
    before, after = (work_of(LLAMA_8B, shape, **sizes) for shape in (plain, drafting))
    assert after.num_bytes - before.num_bytes == pytest.approx(224 * TOKEN_BYTES)
    assert after.num_flops / before.num_flops == pytest.approx(8.0, rel=0.01)
