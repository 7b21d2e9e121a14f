"""The flags of simulated servers, and the servers made from them."""

import argparse
from typing import TYPE_CHECKING, Any

from legato.cli.flags import add_flags, given_fields
from legato.cli.values import count, duration_s, fraction, integer
from legato.core.cache_config import CacheConfig
from legato.core.config import SchedulerConfig
from legato.core.config_fields import fields_of
from legato.core.errors import ConfigError
from legato.core.slo import INTERACTIVE

if TYPE_CHECKING:
    from legato_lab.simulation.drafts import Acceptance
    from legato_lab.simulation.profiled_server import SimulatedServer
    from legato_lab.simulation.profiles import Profile
    from legato_lab.simulation.summary import Slos

_DEFAULT_POLICIES = ("slo", "fixed:512")
_UNPROMISED_POLICIES = ("fixed:512", "prefill-first:512")
_PREFIX_CACHING = "enable_prefix_caching"

_COMMON = (
    "itl_slo_s",
    "itl_slo_quantile",
    "tpot_slo_s",
    "ttft_slo_s",
    "slo_classes",
    "shed_load",
    "max_num_seqs",
    "tenant_weights",
    "admission_optimism",
    "speculative",
)
"""Fields of `SchedulerConfig` that all policies share."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `simulated_server`, except the workload's."""
    _add_machine_flags(parser.add_argument_group("simulated machine"))
    groups = add_flags(parser, SchedulerConfig, only=_COMMON)
    # A report lists all settings, including defaults.
    defaults = {field.name: field.default for field in fields_of(SchedulerConfig)}
    parser.set_defaults(**{name: defaults[name] for name in _COMMON})
    add_flags(parser, CacheConfig, only=(_PREFIX_CACHING,))
    parser.set_defaults(**{_PREFIX_CACHING: CacheConfig().enable_prefix_caching})
    groups["scheduler"].add_argument(
        "--policy",
        dest="policies",
        action="append",
        default=[],
        metavar="KIND[:TOKENS][:ORDER]",
        help="slo, which sizes steps by the ITL and TPOT SLOs, fixed or prefill-first; whole or "
        "whole-first, which do not cut prompts, the latter as early vLLM; TOKENS a step at most; "
        "ORDER slowdown, fcfs, edf or lpm. May be repeated (default: "
        f"{' and '.join(_DEFAULT_POLICIES)}, "
        f"without such SLOs {' and '.join(_UNPROMISED_POLICIES)})",
    )


def add_acceptance_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag that `told_acceptance` reads."""
    group.add_argument(
        "--acceptance",
        metavar="A|TRACE",
        help="how often drafts are right: each with the same chance, in [0, 1), where those before "
        "it are; or a trace of `legato serve`, from which it is learned. Without, nothing is "
        "drafted in simulation",
    )


def told_acceptance(args: argparse.Namespace) -> "Acceptance | None":
    """Return the acceptance of drafts from its flag; None if not given.

    Raises:
        ConfigError: it is neither a chance nor a trace with drafts.
    """
    from pathlib import Path

    from legato.core.step_record import StepRecord
    from legato.observe.traces.trace_file import read_trace
    from legato_lab.simulation.drafts import Acceptance

    if args.acceptance is None:
        return None
    try:
        chance = float(args.acceptance)
    except ValueError:
        _, lines = read_trace(Path(args.acceptance))
        return Acceptance.of_steps(line for line in lines if isinstance(line, StepRecord))
    return Acceptance.even(chance)


def policies(args: argparse.Namespace) -> list[str]:
    """Return the policies to compare, each once."""
    common = _common_config(args)
    bounds_steps = common.promises_pace or common.bounds_gaps
    default = _DEFAULT_POLICIES if bounds_steps else _UNPROMISED_POLICIES
    # Fleets are compared with one policy.
    return list(dict.fromkeys(args.policies or default[: 1 if args.fleets else None]))


def simulated_server(args: argparse.Namespace, policy: str) -> "SimulatedServer":
    """Make the server that the parsed flags describe.

    Raises:
        ConfigError: there is no such policy or profile, or the settings contradict each other.
    """
    import msgspec

    from legato_lab.simulation.policies import parse_policy
    from legato_lab.simulation.profiled_server import SimulatedServer

    common, acceptance = _common_config(args), told_acceptance(args)
    if acceptance is None:
        if isinstance(common.speculative, int):
            raise ConfigError("--speculative needs --acceptance, how often drafts are right")
        common = msgspec.structs.replace(common, speculative="off")
    return SimulatedServer(
        profile=_profile(args),
        scheduler=parse_policy(policy, common),
        enable_prefix_caching=args.enable_prefix_caching,
        acceptance=acceptance,
        overhead_s=args.overhead,
        truth_error=args.truth_error,
        noise=args.noise,
        seed=args.seed,
    )


def promised_slos(args: argparse.Namespace) -> "Slos":
    """Return the promises of the parsed flags, for all policies."""
    from legato_lab.simulation.summary import Slos

    classes = _common_config(args).classes
    return Slos(default=classes[INTERACTIVE], by_class=classes)


def _add_machine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile",
        action=_Profile,
        default="smollm2-135m-cpu",
        metavar="NAME|FILE",
        help="what steps take: one of those built in, which `list` lists, or a file that "
        "`legato calibrate -o` or `legato tune` wrote, or you (docs/reference/profiles.md) "
        "(%(default)s)",
    )
    group.add_argument("--kv-cache-tokens", type=count, metavar="N", help="default: the profile's")
    group.add_argument(
        "--overhead",
        type=duration_s,
        default="0.5ms",
        metavar="TIME",
        help="what passes between two steps (%(default)s)",
    )
    group.add_argument(
        "--truth-error",
        type=fraction,
        default=0.1,
        metavar="FRACTION",
        help="how far the costs of steps are off what the scheduler was told (%(default)s)",
    )
    group.add_argument(
        "--noise",
        type=fraction,
        default=0.05,
        metavar="FRACTION",
        help="by how much the duration of equal steps varies (%(default)s)",
    )
    add_acceptance_flag(group)
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="of all that is random")


class _Profile(argparse.Action):
    """Takes any text, but at "list" prints the built-in profiles."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        if values == "list":
            from legato_lab.simulation.profiles import described_profiles

            print(*described_profiles(), sep="\n")
            parser.exit()
        setattr(namespace, self.dest, values)


def _profile(args: argparse.Namespace) -> "Profile":
    import msgspec

    from legato_lab.simulation.profiles import load_profile

    profile = load_profile(args.profile)
    return msgspec.structs.replace(
        profile,
        max_model_len=args.max_model_len or profile.max_model_len,
        kv_cache_tokens=args.kv_cache_tokens or profile.kv_cache_tokens,
    )


def _common_config(args: argparse.Namespace) -> SchedulerConfig:
    """Return the scheduler settings that apply to all policies."""
    return SchedulerConfig(**given_fields(args, SchedulerConfig))
