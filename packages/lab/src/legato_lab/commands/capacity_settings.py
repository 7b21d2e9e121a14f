"""Settings of a capacity search, from its flags."""

import argparse
from typing import TYPE_CHECKING

from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato_lab.capacity.search import SearchSettings

FIRST_RATE_PER_S = 1.0
LEAST_S = 120.0


def search_settings(
    args: argparse.Namespace, itl_slo_s: float, least_requests: int
) -> "SearchSettings":
    """Make the settings from the flags of `add_trial_flags` and of the workload.

    The workload's flags apply to a trial: `--rate` is the first trial's, and `--num-requests` and
    `--duration` are the least of each.

    Args:
        least_requests: the default of `--num-requests`.

    Raises:
        ConfigError: trials would be too short to be reliable.
    """
    from legato_lab.capacity.search import SearchSettings, TrialLength

    if args.duration is not None and args.duration < LEAST_S:
        raise ConfigError(
            f"a trial lasts at least {LEAST_S:g} s, got a --duration of {args.duration:g} s"
        )
    return SearchSettings(
        itl_slo_s=itl_slo_s,
        itl_slo_quantile=args.itl_slo_quantile,
        least_attainment=args.attainment,
        max_delay_s=args.max_delay,
        length=TrialLength(
            least_s=args.duration or LEAST_S, least_requests=args.num_requests or least_requests
        ),
        num_seeds=args.seeds,
        seed=args.seed,
        start_rate_per_s=args.rate or FIRST_RATE_PER_S,
        least_rate_per_s=args.least_rate,
        precision=args.precision,
    )
