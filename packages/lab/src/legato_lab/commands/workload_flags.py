"""The flags that choose a workload."""

import argparse
import sys
from typing import TYPE_CHECKING

from legato.cli.values import count, duration_s, finite, positive

if TYPE_CHECKING:
    from legato_lab.workload.choice import WorkloadChoice
    from legato_lab.workload.notes import WorkloadNotes


def add_workload_flags(parser: argparse.ArgumentParser, *, model_is_local: bool = False) -> None:
    """Add the flags of `workload_choice`, except `--seed`.

    Args:
        model_is_local: the engine's flags include `--max-model-len` and `--tokenizer`.
    """
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        required=True,
        metavar="FILE|MIX|QUANTILES",
        help="a trace of Azure, BurstGPT or Vidur (CSV), of Mooncake, in Legato's own format or "
        "what `legato serve --trace` recorded (JSONL), or ShareGPT's conversations (JSON); one of "
        "the mixes chat, code, summarize, mixed, interactive+batch, long-prompts-vs-short; or "
        "quantiles of the lengths, such as 'prompt p50=300 p99=4000, output p50=150'",
    )
    group.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help="how many to send (default: all of a file, else 100); the least of a trial where a "
        "capacity is searched",
    )
    group.add_argument(
        "--duration",
        type=duration_s,
        metavar="TIME",
        help="send only those that arrive before; the least length of a trial where a capacity is "
        "searched",
    )
    group.add_argument(
        "--start-at",
        type=duration_s,
        default=0.0,
        metavar="TIME",
        help="begin that far into a file's arrivals (its start)",
    )
    group.add_argument(
        "--sample",
        type=count,
        metavar="N",
        help="of the requests that the flags above choose, N at random by the seed, in their order "
        "and with their arrivals; for a capacity, what trials draw from",
    )
    if not model_is_local:
        group.add_argument(
            "--max-model-len",
            type=count,
            metavar="TOKENS",
            help="the context, which is prompt plus output (default: the model's)",
        )
    group.add_argument(
        "--too-long",
        choices=("refuse", "cut", "drop"),
        help="what becomes of requests that are longer than the context: refuse the workload, cut "
        "their prompts, or drop them (default: refuse a file, cut what is drawn)",
    )
    group.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="requests a second; inf sends all at once (default: the file's own, else inf)",
    )
    group.add_argument(
        "--time-scale",
        type=finite,
        metavar="FACTOR",
        help="stretch the file's own arrivals: 2 halves their rate",
    )
    group.add_argument(
        "--arrivals",
        choices=("trace", "poisson"),
        help="the file's pattern, stretched to the rate, or a random one (default: the file's if "
        "there is one)",
    )
    _add_reading_flags(parser.add_argument_group("workload file"), model_is_local=model_is_local)


def _add_reading_flags(group: argparse._ArgumentGroup, *, model_is_local: bool) -> None:
    group.add_argument(
        "--columns",
        metavar="prompt=NAME,output=NAME[,...]",
        help="which columns of another CSV are which: also arrival (seconds, or ISO 8601 times), "
        "class and tenant",
    )
    group.add_argument(
        "--skip-bad-rows",
        action="store_true",
        help="leave malformed rows out and count them, instead of refusing the file",
    )
    if not model_is_local:
        group.add_argument(
            "--tokenizer",
            metavar="MODEL",
            help="a model's folder, hub id or GGUF file, whose tokenizer measures conversations "
            "(default: the default model)",
        )


def workload_choice(args: argparse.Namespace, max_model_len: int | None) -> "WorkloadChoice":
    """Make the workload choice from the parsed flags.

    Args:
        max_model_len: of the model, used if the flags do not set it.
    """
    from legato_lab.workload.choice import WorkloadChoice
    from legato_lab.workload.formats.csv_table import Columns
    from legato_lab.workload.traces import Reading

    return WorkloadChoice(
        source=args.workload,
        start_at_s=args.start_at,
        num_requests=args.num_requests,
        sample=args.sample,
        rate_per_s=args.rate,
        time_scale=args.time_scale,
        arrivals=args.arrivals,
        duration_s=args.duration,
        max_model_len=getattr(args, "max_model_len", None) or max_model_len,
        too_long=args.too_long,
        reading=Reading(
            columns=Columns.parse(args.columns) if args.columns else None,
            skip_bad_rows=args.skip_bad_rows,
            tokenizer=getattr(args, "tokenizer", None),
        ),
        seed=args.seed,
    )


def trial_choice(args: argparse.Namespace, max_model_len: int | None) -> "WorkloadChoice":
    """Make the workload choice for the trials of a capacity search."""
    return workload_choice(args, max_model_len).for_trials()


def tell_notes(notes: "WorkloadNotes") -> None:
    """Print on stderr, before sending, what the workload lacks."""
    for line in notes.lines():
        print(f"legato: {line}", file=sys.stderr)
