"""Whether what clients are given is what was promised, on a machine that is interrupted."""

import pytest

from tests.scheduler.probes import SHAPES, Interruptions, Outcome, ProbedServer, Shape


def is_kept(outcome: Outcome, shape: Shape) -> bool:
    return outcome.p99_s <= shape.itl_slo_s


@pytest.mark.parametrize("rate", [0.2, 0.6])
@pytest.mark.parametrize("shape", SHAPES)
def test_p99_is_kept_in_nine_probes_of_ten(shape: Shape, rate: float) -> None:
    server = ProbedServer(shape, Interruptions(seed=3, rate=rate))
    outcomes = [server.probe() for _ in range(10)]
    assert sum(is_kept(outcome, shape) for outcome in outcomes) >= 9


@pytest.mark.parametrize("shape", SHAPES)
def test_an_undisturbed_machine_uses_most_of_the_promise_from_the_first_probe_on(
    shape: Shape,
) -> None:
    server = ProbedServer(shape, Interruptions(seed=1, rate=0.0))
    for outcome in [server.probe() for _ in range(5)]:
        assert is_kept(outcome, shape)
        assert outcome.p50_s >= 0.78 * shape.itl_slo_s


def test_a_noisier_machine_is_learned() -> None:
    shape = SHAPES[0]
    server = ProbedServer(shape, Interruptions(seed=0, rate=1.0, lasting=0.5, longest=0.055))
    server.probe()
    assert sum(is_kept(server.probe(), shape) for _ in range(8)) >= 7


def test_a_quiet_machine_gets_its_prompts_sooner_again() -> None:
    shape, noise = SHAPES[0], Interruptions(seed=0, rate=0.6)
    server = ProbedServer(shape, noise)
    wide = [server.probe() for _ in range(6)][-1]
    assert server.step_time.margin > 0.4
    noise.rate = 0.0
    outcomes = [server.probe() for _ in range(45)]
    assert server.step_time.margin < 0.25
    assert outcomes[-1].ttft_s < 0.9 * wide.ttft_s
    assert sum(is_kept(outcome, shape) for outcome in outcomes) >= 43


def test_p99_9_has_fewer_late_gaps_than_p90() -> None:
    late = {}
    for quantile in (0.9, 0.999):
        noise = Interruptions(seed=2, rate=0.3)
        server = ProbedServer(SHAPES[0], noise, itl_slo_quantile=quantile)
        late[quantile] = sum(server.probe().num_late for _ in range(10))
    assert late[0.999] <= 2
    assert late[0.9] > 3 * late[0.999]
