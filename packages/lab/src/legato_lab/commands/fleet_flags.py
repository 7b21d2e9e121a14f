"""The flags of simulated fleets, and the fleets made from them."""

import argparse
from typing import TYPE_CHECKING

from legato.cli.values import byte_size, count, duration_s, whole
from legato.core.errors import ConfigError
from legato_fleet.routing.router import ROUTING_POLICIES

if TYPE_CHECKING:
    from legato_lab.simulation.fleet import SimulatedFleet
    from legato_lab.simulation.link import SimulatedLink
    from legato_lab.simulation.simulated_run import Simulable

_DEFAULT_ROUTING = "kept-promise"


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `simulated_fleets`."""
    group = parser.add_argument_group("simulated fleet")
    group.add_argument(
        "--fleet",
        dest="fleets",
        action="append",
        default=[],
        metavar="SPLIT",
        help="so many of these machines behind a router: such as '4 both', or '2 prefill + 2 "
        "decode', where some compute prompts and send their keys and values to the others. May be "
        "repeated (default: one machine, and no router)",
    )
    group.add_argument(
        "--routing",
        action="append",
        default=[],
        choices=tuple(ROUTING_POLICIES),
        help="how the router chooses; may be repeated; needs --fleet (default: "
        f"{_DEFAULT_ROUTING}, where the promises to a request are most likely kept)",
    )
    _add_life_flags(group)
    add_link_flags(group)


def _add_life_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-replicas",
        type=count,
        metavar="N",
        help="start up to so many where promises are in danger, as a real fleet does, and end them "
        "after (default: those of --fleet)",
    )
    group.add_argument(
        "--replica-mtbf",
        type=duration_s,
        metavar="TIME",
        help="how long a machine serves, on average, until it dies; another is started (default: "
        "none dies)",
    )
    group.add_argument(
        "--replica-start",
        type=duration_s,
        default="60s",
        metavar="TIME",
        help="until a machine serves that is started (%(default)s)",
    )
    group.add_argument(
        "--max-retries",
        type=whole,
        default=0,
        metavar="N",
        help="how often clients of a fleet send a request again that was refused, after the time "
        "that they are told (%(default)s)",
    )


def add_link_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--link-bandwidth",
        type=byte_size,
        default="50G",
        metavar="SIZE",
        help="bytes a second, in and out of each machine (%(default)s)",
    )
    group.add_argument(
        "--link-latency",
        type=duration_s,
        default="1ms",
        metavar="TIME",
        help="from one machine to another (%(default)s)",
    )
    group.add_argument(
        "--kv-token-bytes",
        type=byte_size,
        metavar="SIZE",
        help="of a token's keys and values (default: as the profile tells)",
    )


def link(args: argparse.Namespace) -> "SimulatedLink":
    from legato_lab.simulation.link import SimulatedLink

    return SimulatedLink(bytes_per_s=args.link_bandwidth, latency_s=args.link_latency)


def simulated_fleets(
    args: argparse.Namespace, servers: "dict[str, Simulable]", kv_token_bytes: float | None
) -> "dict[str, SimulatedFleet]":
    """Make every fleet of every server with every routing; key a distinguishing name.

    Args:
        servers: key the name of each.
        kv_token_bytes: used if the flag is not given.

    Raises:
        ConfigError: there is no such fleet, or the settings contradict each other.
    """
    from legato_lab.simulation.fleet import SimulatedFleet, Split

    if args.routing and not args.fleets:
        raise ConfigError("--routing is how a fleet's router chooses, but there is no --fleet")
    fleets: dict[str, SimulatedFleet] = {}
    for split in dict.fromkeys(map(Split.parse, args.fleets)):
        for routing in dict.fromkeys(args.routing or [_DEFAULT_ROUTING]):
            for name, server in servers.items():
                told = [str(split), *[routing] * (len(args.routing) > 1)]
                told += [name] * (len(servers) > 1)
                fleets[", ".join(told)] = SimulatedFleet(
                    server=server,
                    split=split,
                    routing=routing,
                    link=link(args),
                    kv_token_bytes=args.kv_token_bytes or kv_token_bytes,
                    max_replicas=args.max_replicas,
                    mtbf_s=args.replica_mtbf,
                    start_s=args.replica_start,
                    max_retries=args.max_retries,
                    seed=args.seed,
                )
    return fleets
