"""`legato calibrate`: measure how long steps take on this machine."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cli.flags import add_engine_flags, add_model_argument, engine_config, merge_model
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from legato.engine.calibration.calibration_file import Measurements
    from legato.scheduler.cost_fit import MeasuredStep
    from legato.scheduler.step_costs import StepCosts
    from legato.scheduler.step_shape import StepShape


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="measure how long steps take",
        description="Measure how long steps of various shapes take, in about ten seconds, show "
        "what the step-time model makes of it, and keep it for `legato serve`.",
    )
    add_model_argument(parser)
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot predicted against measured times (needs the extra legato-llm[bench])",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="also write what was measured as a profile, with the sizes of context and cache, for "
        "`legato simulate --profile` and `legato tune --machine`",
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the costs and the error of the fit; returns the exit status."""
    from rich.console import Console

    from legato.engine.build.builder import load_runtime
    from legato.scheduler.cost_fit import fit

    merge_model(args)
    runtime = load_runtime(engine_config(args))
    step_times = runtime.step_times
    known = step_times.measure(step_times.calibration())
    steps, quality = known.steps, known.quality
    assert quality is not None
    console = Console(highlight=False, soft_wrap=True)
    has_drafts = any(shape.num_draft_rows for shape, _ in steps)
    console.print(_table(fit(steps, runtime.rows), has_drafts=has_drafts))
    console.print(
        f"{len(steps)} steps, of which half are predicted within {quality.median_error:.1%} and "
        f"95 % within {quality.p95_error:.1%}"
    )
    if args.plot is not None:
        _plot(steps, fit(steps, runtime.rows), args.plot)
        console.print(f"plotted to {args.plot}")
    if quality.doubt:
        console.print(
            f"not kept: {quality.doubt}. Measure again when nothing else runs on the machine, and "
            "with --num-threads no more than its cores"
        )
        return 1
    console.print(f"kept in {step_times.file.path}")
    if args.output is not None:
        _write(args.output, step_times.measurements(steps))
        console.print(f"written to {args.output}")
    return 0


def _write(path: Path, measured: "Measurements") -> None:
    from legato.engine.calibration.calibration_file import write_profile

    try:
        write_profile(path, measured)
    except OSError as error:
        raise ConfigError(f"cannot write the profile: {error}") from error


def _table(costs: "StepCosts", *, has_drafts: bool) -> "Table":
    from rich.table import Table

    from legato.scheduler.step_costs import ROW_BOUNDS

    table = Table("what", "costs", box=None)
    bounds = zip((1, *(b + 1 for b in ROW_BOUNDS)), (*ROW_BOUNDS, None), strict=True)
    lines = [
        ("a step", costs.step_s),
        *(
            (f"token {first} to {last}" if last else f"token {first} and on", seconds)
            for (first, last), seconds in zip(bounds, costs.row_s, strict=True)
        ),
        ("a decode", costs.decode_row_s),
        ("a key that a decode reads", costs.decode_context_s),
        *(_drafts(costs) if has_drafts else ()),
        ("a prefill chunk", costs.chunk_s),
        ("a key that a prefill chunk reads", costs.context_s),
        ("a query-key pair of a prefill chunk", costs.area_s),
        ("a sampled row", costs.sample_s),
        *([("an expert that computes any row", costs.expert_s)] if costs.rows.experts else ()),
        *([("unpacking the weights", costs.unpack_s)] if costs.rows.most_packed else ()),
    ]
    for what, seconds in lines:
        table.add_row(
            what, f"{1e6 * seconds:,.3g} µs" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"
        )
    return table


def _drafts(costs: "StepCosts") -> list[tuple[str, float]]:
    return [("a draft", costs.draft_row_s), ("a key that a draft reads", costs.draft_context_s)]


def _plot(steps: "list[MeasuredStep]", costs: "StepCosts", path: Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    predicted_s = np.array([costs.seconds(shape) for shape, _ in steps])
    measured_s = np.array([seconds for _, seconds in steps])
    kinds = np.array([_kind(shape) for shape, _ in steps])
    figure, axis = plt.subplots(figsize=(5, 5))
    for kind in np.unique(kinds):
        chosen = kinds == kind
        axis.plot(1e3 * measured_s[chosen], 1e3 * predicted_s[chosen], ".", label=kind)
    axis.axline((10, 10), slope=1, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _kind(shape: "StepShape") -> str:
    if shape.num_prefill_chunks:
        return "with prefill"
    return "with drafts" if shape.num_draft_rows else "decodes only"
