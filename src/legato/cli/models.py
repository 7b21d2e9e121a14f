"""`legato models`: the supported architectures, or what a checkpoint is and how it would run."""

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from legato.cli.values import filled
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.engine.build.dry_run import DryRun
    from legato.engine.build.model_report import ModelReport
    from legato.model.config_keys import KeyUse

_REFUSED = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "models",
        help="list the supported models, or describe a checkpoint",
        description="List the supported architectures and the layers that run each. With MODEL, "
        "describe a checkpoint from the headers of its files, and how `legato serve` would run it "
        "here: memory, context, and the speed that a probe of a second expects of files on this "
        "machine; the exit status is 1 if it would not.",
    )
    parser.add_argument(
        "model",
        type=filled,
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, or a hub id",
    )
    parser.add_argument("--revision", type=filled, help="branch, tag or commit of a hub model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-probe",
        action="store_true",
        help="do not load the first layers for a second to say how fast it would be here",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table of architectures, or the report of one model."""
    if args.model is None:
        _print_architectures(as_json=args.json)
        return 0
    # A local import: these modules load torch, which the help does not need.
    from legato.checkpoint.source import is_hub_id
    from legato.engine.build.dry_run import dry_run
    from legato.engine.build.model_report import report_model

    config = ModelConfig(model=args.model, revision=args.revision)
    here = None
    try:
        report = report_model(config)
        if not (args.no_probe or is_hub_id(args.model)):
            # As `legato serve` has it without flags.
            scheduler = SchedulerConfig(bounds_gaps=True)
            here = dry_run(EngineConfig(model=config, scheduler=scheduler))
    except UnsupportedModelError as error:
        if args.json:
            _print_json({"model": args.model, "refused": str(error)})
        else:
            print(f"legato: {error}", file=sys.stderr)
        return _REFUSED
    if args.json:
        _print_json(msgspec.to_builtins(report) | {"here": here})
        return 0
    print_lines(report.model, _report_lines(report))
    if here is not None:
        print_lines("here, with the default flags", here_lines(here))
    return _REFUSED if here is not None and here.refusals else 0


def print_lines(title: str, lines: "Mapping[str, str]") -> None:
    """Print a title and named values below it."""
    width = max(map(len, lines))
    print(title)
    for name, value in lines.items():
        print(f"  {name:{width}}  {value}")


def here_lines(run: "DryRun") -> dict[str, str]:
    """Describe what a start would do on this machine."""
    lines = {
        "processor": run.processor,
        "computed by": f"{run.kernels or 'nothing'}, on {run.threads} threads"
        if run.device == "cpu"
        else run.kernels,
        "memory of the weights": _size(run.weight_bytes),
        "memory of the cache": f"{_size(run.cache_bytes)}, for {run.cache_tokens:,} tokens",
        "memory of a step": f"{_size(run.step_bytes)} at most",
        "free memory": _size(run.free_bytes),
        "context": f"{run.max_model_len:,} tokens, {run.max_num_seqs} requests at once",
    }
    if run.speed is not None:
        lines |= {
            "time of a token": f"{1e3 * run.speed.token_s:.3g} ms for one stream, without drafts",
            "speed of prompts": f"{run.speed.prompt_tokens_s:,.0f} tokens a second",
            "measured": f"the first {run.speed.num_layers} layers, for a second",
        }
    elif run.unmeasured:
        lines["speed"] = f"not measured: {run.unmeasured}"
    lines["flags"] = run.command
    return lines | {f"refused {number}": text for number, text in enumerate(run.refusals, 1)}


def _print_architectures(*, as_json: bool) -> None:
    from legato.cli.model_table import architecture_rows
    from legato.cli.table import Table, print_table

    rows = architecture_rows()
    if as_json:
        _print_json(rows)
        return
    header = ["architecture", "model type", "native CPU layers", "GPU layers"]
    cells = [[r.architecture, r.model_type, r.native or "yes", r.gpu or "yes"] for r in rows]
    print_table(Table("Architectures; PyTorch's layers run all of them on CPUs", header, cells))


def _report_lines(report: "ModelReport") -> dict[str, str]:
    lines = {
        "architecture": report.architecture,
        "parameters": _parameters(report),
        "layers": str(report.num_layers),
        "context": f"{report.max_model_len:,} tokens",
        "dtype": report.dtype,
        "quantization": report.quantization or "none",
        "returns": ", ".join(report.returns),
        "on a CPU": _with_reason(f"{report.cpu_layers} layers", report.why_not_native),
        "on a GPU": f"no: {report.why_not_gpu}" if report.why_not_gpu else "yes",
        "weights": _weights(report),
        "cache a token": _size(report.cache_token_bytes),
        "cache of a whole context": _size(report.cache_bytes),
    }
    if report.state_bytes:
        lines["states of a request"] = _size(report.state_bytes)
    if report.keys.used:
        lines |= _keys(report.keys)
    return lines


def _keys(keys: "KeyUse") -> dict[str, str]:
    return {
        "keys used": ", ".join(keys.used),
        "keys defaulted": ", ".join(keys.defaulted),
        "keys without effect": ", ".join(keys.without_effect),
        "keys that nothing reads": ", ".join(keys.unread) or "none",
    }


def _parameters(report: "ModelReport") -> str:
    total, active = report.num_parameters, report.num_active_parameters
    return f"{total:,}" if active == total else f"{total:,}; a token takes {active:,}"


def _weights(report: "ModelReport") -> str:
    size = _size(report.weight_bytes)
    if report.widened_weight_bytes <= report.weight_bytes:
        return size
    return f"{size}; {_size(report.widened_weight_bytes)} with --quantization none"


def _with_reason(what: str, why_not_native: str) -> str:
    return f"{what}, since {why_not_native}" if why_not_native else what


def _size(num_bytes: int) -> str:
    """Format a size for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
