"""The work that a step cannot do without, by hand."""

from legato.bench.kernels import Roofline, Work, work_of
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
    assert work.num_bytes == 1000 + 2 * KEY_VALUES * 150
    assert work.num_flops == 2 * 3 * (LAYERS + HEAD) + 4 * 2 * 4 * 32 * 150


def test_a_chunk_sees_what_is_before_each_of_its_tokens() -> None:
    work = work_of(
        SPEC, step_shape(chunk=3, start=10), token_bytes=2 * KEY_VALUES, weight_bytes=1000
    )
    assert work.num_bytes == 1000 + 2 * KEY_VALUES * 13
    assert work.num_flops == 2 * 3 * LAYERS + 4 * 2 * 4 * 32 * (11 + 12 + 13)


def test_a_step_takes_the_longer_of_reading_and_multiplying() -> None:
    roofline = Roofline(bytes_a_s=10.0, flops_a_s=100.0)
    assert roofline.least_s(Work(num_bytes=20.0, num_flops=100.0)) == 2.0
    assert roofline.least_s(Work(num_bytes=20.0, num_flops=500.0)) == 5.0
