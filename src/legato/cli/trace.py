"""`legato trace convert`: a trace in another format."""

import argparse
from itertools import islice
from pathlib import Path

from legato.core.errors import ConfigError

_LINES_AT_ONCE = 1000


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("trace", help="convert traces", description="Convert traces.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    convert = actions.add_parser(
        "convert",
        help="write a trace in another format",
        description="Write a trace of lines of JSON as another file, whose name tells its format: "
        ".json for the Perfetto UI, .jsonl; either may end in .gz.",
    )
    convert.add_argument("trace", type=Path, metavar="TRACE", help="as --trace FILE.jsonl writes")
    convert.add_argument("output", type=Path, metavar="FILE", help="is overwritten")
    convert.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert a trace; returns the exit status."""
    from legato.observe.traces.trace_file import read_trace
    from legato.observe.traces.tracer import trace_writer

    if args.output.exists() and args.output.samefile(args.trace):
        raise ConfigError(f"{args.output} is the trace itself")
    header, lines = read_trace(args.trace)
    try:
        writer = trace_writer(args.output, header)
        while some := list(islice(lines, _LINES_AT_ONCE)):
            writer.write(some)
        writer.close()
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error}") from error
    return 0
