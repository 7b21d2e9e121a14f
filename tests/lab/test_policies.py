"""The policies that a user can name."""

import argparse

import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.slo import SloClass
from legato_lab.commands import simulate
from legato_lab.commands.simulate_flags import policies
from legato_lab.simulation.policies import parse_policy

GOLD = SloClass(itl_s=0.05, ttft_s=1.0)
PROMISED = SchedulerConfig(
    itl_slo_s=0.1, tpot_slo_s=0.08, ttft_slo_s=2.0, slo_classes={"gold": GOLD}, max_num_seqs=7
)


def test_slo_promises_all_of_it() -> None:
    assert parse_policy("slo", PROMISED) == PROMISED


@pytest.mark.parametrize(
    ("text", "policy", "tokens", "order"),
    [
        ("fixed", "stall-free", None, "slowdown"),
        ("fixed:512", "stall-free", 512, "slowdown"),
        ("fixed:edf", "stall-free", None, "edf"),
        ("prefill-first:64:fcfs", "prefill-first", 64, "fcfs"),
    ],
)
def test_the_others_promise_no_pace(text: str, policy: str, tokens: int | None, order: str) -> None:
    assert parse_policy(text, PROMISED) == SchedulerConfig(
        policy=policy,  # type: ignore[arg-type]
        max_num_batched_tokens=tokens,
        prefill_order=order,  # type: ignore[arg-type]
        ttft_slo_s=2.0,
        slo_classes={"gold": SloClass(ttft_s=1.0)},
        max_num_seqs=7,
    )


def test_auto_bounds_the_steps_of_slo_alone() -> None:
    auto = SchedulerConfig(bounds_gaps=True)
    assert parse_policy("slo", auto) == auto
    assert parse_policy("fixed:512", auto) == SchedulerConfig(max_num_batched_tokens=512)
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate", "--workload", "chat", "--itl-slo", "auto"])
    assert policies(args) == ["slo", "fixed:512"]


@pytest.mark.parametrize(
    ("text", "policy"), [("whole", "stall-free"), ("whole-first", "prefill-first")]
)
def test_whole_prompts_are_not_cut(text: str, policy: str) -> None:
    config = parse_policy(text, PROMISED)
    assert (config.policy, config.enable_chunked_prefill) == (policy, False)
    assert config.resolve(1000).max_num_batched_tokens == 1007
    with pytest.raises(ConfigError, match="without chunked prefill"):
        parse_policy(f"{text}:512", PROMISED).resolve(1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("random", "no policy 'random'"),
        ("", "no policy ''"),
        ("fixed:many", "'many' is neither"),
        ("fixed:", "'' is neither"),
        ("fixed:0", "max_num_batched_tokens"),
    ],
)
def test_unknown_policies(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_policy(text, PROMISED)


def test_slo_without_a_promise_is_refused() -> None:
    with pytest.raises(ConfigError, match="none is set"):
        parse_policy("slo", SchedulerConfig(ttft_slo_s=1.0))
