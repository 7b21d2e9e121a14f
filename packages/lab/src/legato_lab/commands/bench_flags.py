"""The flags of `legato bench`, except those of the workload."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cli.flags import AddItems, GapPromise
from legato.cli.values import (
    SLO_CLASS,
    count,
    duration_s,
    integer,
    positive,
    share,
    slo_class,
)
from legato.core.slo import P99, SloClass

if TYPE_CHECKING:
    from legato_lab.load.client import Address
    from legato_lab.simulation.summary import Slos


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="%(default)s"
    )
    group.add_argument("--model", metavar="NAME", help="default: the only one it serves")
    group.add_argument("--api-key", metavar="KEY")
    add_prompt_flags(group, vocab_size=None, default="32000, or as many as the model has")


def server_address(args: argparse.Namespace) -> "Address":
    """Return the server's address from the flags of `add_server_flags`."""
    from legato_lab.load.client import Address

    return Address(base_url=args.base_url, model=args.model, api_key=args.api_key)


def add_prompt_flags(
    group: argparse._ArgumentGroup, *, vocab_size: int | None, default: str = "%(default)s"
) -> None:
    """Args: vocab_size: the default; default: its description in the help."""
    group.add_argument(
        "--vocab-size",
        type=count,
        default=vocab_size,
        metavar="N",
        help=f"prompts are random tokens below this ({default})",
    )
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="of all that is random")


def add_slo_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SLOs, which decide what counts as goodput")
    group.add_argument(
        "--itl-slo",
        dest="itl_slo_s",
        action=GapPromise,
        behind=("itl_slo_quantile",),
        metavar="TIME[:pQ]",
        help="for 99 of 100 gaps of a request, or what a percentile says",
    )
    parser.set_defaults(itl_slo_quantile=P99)
    group.add_argument(
        "--tpot-slo", dest="tpot_slo_s", type=duration_s, metavar="TIME", help="for their mean"
    )
    group.add_argument(
        "--ttft-slo", dest="ttft_slo_s", type=duration_s, metavar="TIME", help="for the first token"
    )
    group.add_argument(
        "--slo-class",
        dest="slo_classes",
        type=slo_class,
        action=AddItems,
        default={},
        metavar=SLO_CLASS,
        help="for requests of a class, instead of those above; may be repeated",
    )


def promised_slos(args: argparse.Namespace) -> "Slos":
    """Return the promises from the flags of `add_slo_flags`."""
    from legato_lab.simulation.summary import Slos

    default = SloClass(
        itl_s=args.itl_slo_s,
        itl_quantile=args.itl_slo_quantile,
        tpot_s=args.tpot_slo_s,
        ttft_s=args.ttft_slo_s,
    )
    return Slos(default=default, by_class=args.slo_classes)


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--itl-slo",
        dest="itl_slo_s",
        action=GapPromise,
        behind=("itl_slo_quantile",),
        required=True,
        metavar="TIME[:pQ]",
        help="99 of 100 gaps are at most as long, or what a percentile says",
    )
    add_trial_flags(group, precision=0.05, num_seeds=1)


def add_trial_flags(group: argparse._ArgumentGroup, *, precision: float, num_seeds: int) -> None:
    """Add the flags of `search_settings`, except the SLO. Args: defaults."""
    group.add_argument(
        "--max-delay",
        type=duration_s,
        default="2s",
        metavar="TIME",
        help="half of the scheduling delays are at most as long (%(default)s)",
    )
    group.add_argument(
        "--attainment",
        type=share,
        metavar="SHARE",
        help="so large a share of the requests, such as 0.99, keeps the ITL SLO, each by itself: "
        "asked instead of the gaps of all requests together, which excuse rare long stalls",
    )
    group.add_argument(
        "--least-rate",
        type=positive,
        default=0.0,
        metavar="R",
        help="search no rate below this, where trials are long (all are)",
    )
    group.add_argument(
        "--precision",
        type=positive,
        default=precision,
        metavar="FRACTION",
        help="how near to come to a rate that is not sustained (%(default)s)",
    )
    group.add_argument(
        "--seeds",
        type=count,
        default=num_seeds,
        metavar="K",
        help="searches with other requests and arrivals each, of which the mean and its 95 %% "
        "confidence interval are told; one has no interval (%(default)s)",
    )


def add_probe_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("probe")
    group.add_argument("--streams", type=count, default=8, metavar="N", help="%(default)s")
    group.add_argument(
        "--long",
        type=count,
        metavar="TOKENS",
        help="length of a long prompt (7000, or what the model's context holds)",
    )
    group.add_argument(
        "--longs", type=count, default=1, metavar="N", help="long prompts at once (%(default)s)"
    )
    group.add_argument(
        "--steady",
        type=duration_s,
        default="4s",
        metavar="TIME",
        help="how long to watch the streams before (%(default)s)",
    )


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--name", help="of this run beside others (default: the model's)")
    add_output_flag(group)


def add_output_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        type=Path,
        default="out",
        metavar="FOLDER",
        help="where JSON and HTML go (%(default)s)",
    )
