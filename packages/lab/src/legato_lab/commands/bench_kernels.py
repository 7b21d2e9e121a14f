"""`legato bench kernels`: the model's steps beside the machine's roofline."""

import argparse
import sys
from typing import TYPE_CHECKING

from legato.cli.flags import add_engine_flags, engine_config
from legato.core.config import Kernels
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from legato_lab.kernels import MeasuredKernel
    from legato_lab.work import MeasuredRates

    Measured = dict[str, tuple[list[MeasuredKernel], float]]

_KERNELS: tuple[Kernels, ...] = ("torch", "avx2", "avx512", "amx")
_OF_A_GPU = "triton"


def add_kernels_parser(
    benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = benchmarks.add_parser(
        "kernels",
        help="compare steps with what the machine can do",
        description="Measure decode steps and prefill chunks with each set of kernels that runs "
        "on this processor, or only with those of --kernels, or on a GPU, beside what reading "
        "memory and multiplying would take at least.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare what the kernels compute with PyTorch's, for 1 to 130 rows, instead of "
        "measuring them",
    )
    add_engine_flags(parser)
    parser.set_defaults(benchmark=_kernels)


def _kernels(args: argparse.Namespace) -> None:
    if args.check:
        sys.exit(0 if _agree(engine_config(args).model.kernels) else 1)
    _measure(args)


def _agree(asked: Kernels) -> bool:
    """Whether all native kernels that run here compute the same as PyTorch."""
    from rich.console import Console

    from legato.executor.kernel_check import ALL_COUNTS, disagreements
    from legato.model.native_kernels import NativeKernels, native_instructions

    console, are_wrong = Console(highlight=False, soft_wrap=True), False
    checked = [name for name in native_instructions() if asked in ("auto", name)]
    if not checked:
        raise ConfigError(f"no native kernels run here for --kernels {asked}")
    for instructions in checked:
        with console.status(f"checking {instructions}"):
            wrong = list(disagreements(NativeKernels(1, instructions), ALL_COUNTS))
        console.print(f"{instructions}: {f'{len(wrong)} WRONG' if wrong else 'as PyTorch'}")
        for disagreement in wrong:
            console.print(f"  {disagreement}")
        are_wrong = are_wrong or bool(wrong)
    return not are_wrong


def _measure(args: argparse.Namespace) -> None:
    from rich.console import Console

    from legato.engine.assembly.blueprint import resolve_device
    from legato_lab.kernels import measure_kernels, measure_roofline

    console, config, measured = Console(highlight=False, soft_wrap=True), engine_config(args), {}
    device, wanted = resolve_device(config.model.device), config.model.kernels
    several = _KERNELS if wanted == "auto" and device.type == "cpu" else (wanted,)
    with console.status("measuring the machine") as status:
        roofline = measure_roofline(device)
        for kernels in several:
            try:
                name = kernels if device.type == "cpu" else _OF_A_GPU
                measured[name] = measure_kernels(config, kernels, status.update)
            except ConfigError as error:
                if len(several) == 1:
                    raise
                console.print(str(error))
        # Other programs may have slowed the first measurement.
        status.update("measuring the machine again")
        roofline = roofline.or_faster(measure_roofline(device))
    console.print(_table(measured, roofline))
    console.print(
        f"memory {roofline.bytes_a_s / 1e9:.1f} GB/s, "
        f"matrix products {roofline.flops_a_s / 1e12:.2f} TFLOP/s"
    )
    for name, (_, attention) in measured.items():
        console.print(
            f"attention, {name}: {attention / 1e12:.2f} TFLOP/s, "
            f"{attention / roofline.flops_a_s:.0%} of that"
        )


def _table(measured: "Measured", roofline: "MeasuredRates") -> "Table":
    from rich.table import Table

    table = Table("step", *measured, "roofline", *(f"{name} / roofline" for name in measured))
    for steps in zip(*(found for found, _ in measured.values()), strict=True):
        least_s = roofline.least_s(steps[0].work)
        table.add_row(
            steps[0].name,
            *(f"{1e3 * step.seconds:.1f} ms" for step in steps),
            f"{1e3 * least_s:.1f} ms",
            *(f"{step.seconds / least_s:.2f}" for step in steps),
        )
    return table
