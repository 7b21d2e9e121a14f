"""What is believed of guesses follows what comes of them."""

import random

import pytest

from legato.speculation.survival import Beliefs, Luck, Rates


def test_at_first_the_prior_is_believed() -> None:
    assert [Rates([0.1, 0.6])[kind] for kind in range(2)] == pytest.approx([0.1, 0.6])


def test_one_trial_tells_something_and_not_all() -> None:
    rates = Rates([0.5, 0.5])
    rates.observe(0, is_right=True)
    assert 0.5 < rates[0] < 0.7
    assert rates[1] == 0.5


@pytest.mark.parametrize("truth", [0.0, 0.3, 0.9, 1.0])
def test_rates_follow_the_truth_and_follow_it_again_when_it_changes(truth: float) -> None:
    rng, rates = random.Random(0), Rates([0.5])
    for share in (truth, 1.0 - truth):
        for _ in range(3000):
            rates.observe(0, is_right=rng.random() < share)
        assert rates[0] == pytest.approx(share, abs=0.05)


def test_half_of_what_is_believed_is_of_the_last_few_hundred() -> None:
    rates = Rates([0.5])
    for _ in range(3000):
        rates.observe(0, is_right=False)
    for _ in range(350):
        rates.observe(0, is_right=True)
    assert rates[0] == pytest.approx(0.5, abs=0.05)


def test_what_is_tried_no_more_is_a_prior_again() -> None:
    rates, untried = Rates([0.3, 0.6]), Rates([0.3, 0.6])
    for _ in range(3000):
        rates.observe(0, is_right=True)
    rates.recover()
    assert rates[0] == pytest.approx(1.0, abs=0.02)
    assert rates[1] == pytest.approx(0.6)
    for _ in range(2000):
        rates.recover()
    for each in (rates, untried):
        each.observe(0, is_right=True)
    assert rates[0] == pytest.approx(untried[0], abs=0.01)


def test_a_request_is_like_all_others_at_first() -> None:
    assert Luck().chance(0.4) == pytest.approx(0.4)


def test_nothing_is_certain() -> None:
    luck = Luck()
    for _ in range(50):
        luck.observe(0.2, is_right=True)
    assert luck.chance(0.9) < 1.0


@pytest.mark.parametrize("rate", [0.2, 0.8])
def test_luck_follows_how_a_request_fares(rate: float) -> None:
    lucky, usual, unlucky = Luck(), Luck(), Luck()
    for trial in range(50):
        lucky.observe(rate, is_right=True)
        usual.observe(rate, is_right=trial % 5 < 5 * rate)
        unlucky.observe(rate, is_right=False)
    assert unlucky.chance(rate) < 0.7 * rate
    assert usual.chance(rate) == pytest.approx(rate, rel=0.25)
    assert lucky.chance(rate) > min(0.9, 1.4 * rate)


def test_luck_is_forgotten_in_a_few_trials() -> None:
    luck = Luck()
    for _ in range(50):
        luck.observe(0.5, is_right=False)
    worst = luck.chance(0.5)
    for _ in range(20):
        luck.observe(0.5, is_right=True)
    assert luck.chance(0.5) > 0.5 > 2 * worst * 0.9


def test_bad_luck_passes_without_trials() -> None:
    luck = Luck()
    for _ in range(50):
        luck.observe(0.5, is_right=False)
    worst = luck.chance(0.5)
    luck.recover()
    assert luck.chance(0.5) == pytest.approx(worst, rel=0.05)
    for _ in range(1000):
        luck.recover()
    assert luck.chance(0.5) == pytest.approx(0.5, rel=0.02)


def test_a_kind_s_prior_is_believed_of_a_request_like_all_others() -> None:
    assert Beliefs([0.1, 0.6]).chance(1, Luck()) == pytest.approx(0.6)


@pytest.mark.parametrize("truth", [0.5, 0.6, 0.8])
def test_what_looks_good_is_believed_as_far_as_it_was_right(truth: float) -> None:
    """Requests differ by chance alone, so that the luckiest one's luck tells nothing."""
    rng, beliefs = random.Random(0), Beliefs([0.5])
    lucks = [Luck() for _ in range(8)]
    expected = right = 0.0
    for step in range(4000):
        best = max(lucks, key=lambda luck: beliefs.chance(0, luck))
        chance = beliefs.chance(0, best)
        for luck in lucks:
            is_right = rng.random() < truth
            if luck is best and step >= 1000:
                expected, right = expected + chance, right + is_right
            beliefs.observe(0, luck, is_right=is_right)
    assert expected == pytest.approx(right, rel=0.1)
