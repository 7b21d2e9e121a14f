"""Whether what clients are given is what was promised, on a machine that is interrupted."""

import pytest

from tests.scheduler.probes import SHAPES, Interruptions, Outcome, ProbedServer, Shape


def is_kept(outcome: Outcome, shape: Shape) -> bool:
    return outcome.p99_s <= shape.itl_slo_s


@pytest.mark.parametrize("rate", [0.014, 0.04])
@pytest.mark.parametrize("shape", SHAPES)
def test_p99_is_kept_in_nine_probes_of_ten_from_the_first_on(shape: Shape, rate: float) -> None:
    server = ProbedServer(shape, Interruptions(seed=1, rate=rate))
    outcomes = [server.probe() for _ in range(10)]
    assert is_kept(outcomes[0], shape)
    assert sum(is_kept(outcome, shape) for outcome in outcomes) >= 9


def test_a_noisier_machine_is_learned() -> None:
    shape = SHAPES[0]
    server = ProbedServer(shape, Interruptions(seed=0, rate=0.04, lasting=0.52, longest=0.8))
    server.probe()
    assert sum(is_kept(server.probe(), shape) for _ in range(8)) >= 7


def test_a_quiet_machine_gets_its_prompts_sooner_again() -> None:
    shape, noise = SHAPES[0], Interruptions(seed=0, rate=0.04)
    server = ProbedServer(shape, noise)
    wide = [server.probe() for _ in range(6)][-1]
    assert server.step_time.margin > 0.5
    noise.rate = 0.0
    outcomes = [server.probe() for _ in range(26)]
    assert server.step_time.margin < 0.35
    assert outcomes[-1].ttft_s < 0.93 * wide.ttft_s
    assert sum(is_kept(outcome, shape) for outcome in outcomes) >= 25


def test_p99_9_has_fewer_late_gaps_than_p90() -> None:
    late = {}
    for quantile in (0.9, 0.999):
        noise = Interruptions(seed=2, rate=0.02)
        server = ProbedServer(SHAPES[0], noise, itl_slo_quantile=quantile)
        late[quantile] = sum(server.probe().num_late for _ in range(10))
    assert late[0.999] <= 1
    assert late[0.9] > late[0.999]
