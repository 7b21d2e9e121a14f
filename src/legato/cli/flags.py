"""The flags that describe an engine, shared by every command that starts one.

A flag's destination is the name of its field in `legato.core.config`. A flag that is not given
leaves no trace in the namespace, so that each default is written down once, there.
"""

import argparse
import re
from typing import Any, get_args

import msgspec

from legato.cli.durations import duration_s
from legato.core.config import (
    CacheConfig,
    CalibrationConfig,
    Device,
    DType,
    EngineConfig,
    Kernels,
    ModelConfig,
    Policy,
    PrefillOrder,
    Quantization,
    SchedulerConfig,
)
from legato.core.errors import ConfigError
from legato.core.slo import SloClass

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags from which `engine_config` builds an `EngineConfig`."""
    add_machine_flags(parser)
    _add_promise_flags(parser.add_argument_group("promises", argument_default=argparse.SUPPRESS))
    _add_scheduler_flags(parser.add_argument_group("scheduler", argument_default=argparse.SUPPRESS))


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add those that say what runs, and on what, but nothing of how it is scheduled."""
    _add_model_flags(parser.add_argument_group("model", argument_default=argparse.SUPPRESS))
    _add_cache_flags(parser.add_argument_group("KV cache", argument_default=argparse.SUPPRESS))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that the parsed flags describe.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig(
        model=ModelConfig(**given_fields(args, ModelConfig)),
        cache=CacheConfig(**given_fields(args, CacheConfig)),
        scheduler=SchedulerConfig(**given_fields(args, SchedulerConfig)),
        calibration=CalibrationConfig(**given_fields(args, CalibrationConfig)),
    )


def byte_size(text: str) -> int:
    """Bytes in a size such as 512M, 2G, 2GiB or 1000000; units are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is none of these, or nothing.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G")
    return size


def given_fields(args: argparse.Namespace, config: type[msgspec.Struct]) -> dict[str, Any]:
    """The flags that were given and are fields of `config`; key the field's name."""
    given = vars(args)
    return {name: given[name] for name in config.__struct_fields__ if name in given}


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        help="Hugging Face folder or hub id, or path to a GGUF file "
        f"(default: {ModelConfig().model})",
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub model")
    group.add_argument(
        "--dtype",
        choices=get_args(DType),
        help="of weights and cache (default: auto, the checkpoint's own)",
    )
    group.add_argument(
        "--device",
        choices=get_args(Device),
        help="where to run (default: auto, a GPU if there is one)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus output (default: the model's own)",
    )
    group.add_argument(
        "--num-threads",
        type=int,
        metavar="N",
        help="threads of the forward pass on CPU (default: one a core)",
    )
    group.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="of weights: to 8 or 4 bits, or as a GGUF file has them where that is Q8_0, Q4_0 or "
        "Q4_1 (default: none, in the dtype)",
    )
    group.add_argument(
        "--kernels",
        choices=get_args(Kernels),
        help="what computes the layers: Legato's own kernels for a set of instructions, which want "
        "bfloat16, or PyTorch's (default: auto, the fastest that can run)",
    )


def _add_promise_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--itl-slo",
        dest="itl_slo_s",
        type=duration_s,
        metavar="TIME",
        help="each token comes at most this long after the one before it, such as 100ms; chunks "
        "are as long as that allows (default: no promise, a fixed token budget)",
    )
    group.add_argument(
        "--tpot-slo",
        dest="tpot_slo_s",
        type=duration_s,
        metavar="TIME",
        help="token k comes at most k times this after the first: single gaps may be longer",
    )
    group.add_argument(
        "--ttft-slo",
        dest="ttft_slo_s",
        type=duration_s,
        metavar="TIME",
        help="the first token comes at most this long after the request, such as 2s",
    )
    group.add_argument(
        "--slo-class",
        dest="slo_classes",
        action=_AddSloClass,
        metavar="NAME:itl=TIME,tpot=TIME,ttft=TIME",
        help="a further class that requests may ask for by slo_class; may be repeated. There is "
        'always "interactive", which has the SLOs above, and "batch", which has none',
    )
    group.add_argument(
        "--shed-load",
        action=argparse.BooleanOptionalAction,
        help="refuse a request at once whose TTFT SLO cannot be met (default: no)",
    )
    group.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        help="where an SLO needs it, measure how long steps take at start-up, unless that is on "
        "disk from an earlier start (default: yes)",
    )
    group.add_argument("--calibration-dir", metavar="FOLDER", help="where measurements are kept")


class _AddSloClass(argparse.Action):
    """Collects NAME:itl=TIME,... in a dict; key the class's name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        try:
            name, slo = slo_class(values)
        except (ConfigError, argparse.ArgumentTypeError) as error:
            parser.error(f"argument --slo-class: {error}")
        classes: dict[str, SloClass] = getattr(namespace, self.dest, {})
        setattr(namespace, self.dest, {**classes, name: slo})


def slo_class(text: str) -> tuple[str, SloClass]:
    """Parse NAME:itl=TIME,tpot=TIME,ttft=TIME; every part but the name may be missing.

    Raises:
        argparse.ArgumentTypeError: it has another form.
        ConfigError: a time is not positive.
    """
    name, _, promises = text.partition(":")
    given: dict[str, float] = {}
    for promise in filter(None, promises.split(",")):
        kind, _, time = promise.partition("=")
        if kind not in ("itl", "tpot", "ttft") or not name:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME:itl=TIME,tpot=TIME,ttft=TIME")
        given[f"{kind}_s"] = duration_s(time)
    return name, SloClass(**given)


def _add_cache_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help=f"tokens a block (default: {CacheConfig().block_size})",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--kv-cache-memory",
        dest="kv_cache_memory_bytes",
        type=byte_size,
        metavar="SIZE",
        help="size of the cache, such as 512M or 2GiB; on a CPU it is taken at the start",
    )
    size.add_argument(
        "--gpu-memory-utilization",
        dest="memory_utilization",
        type=float,
        metavar="FRACTION",
        help="or a fraction of the free memory (default: 0.9 of a GPU's, 0.25 of the host's)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="keep the blocks of prompts and outputs, and share them among requests that begin "
        "alike (default: yes)",
    )
    group.add_argument(
        "--swap-space",
        dest="swap_space_bytes",
        type=byte_size,
        metavar="SIZE",
        help="host memory, such as 4GiB, for blocks of a GPU's cache that would be forgotten "
        "(default: none)",
    )


def _add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    defaults = SchedulerConfig()
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="token budget of a step (default: 512; 2048 under an ITL or TPOT SLO; whole prompts "
        "without chunked prefill)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"most requests running at once (default: {defaults.max_num_seqs})",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help=f"requests that may wait; one more is refused (default: {defaults.max_waiting})",
    )
    group.add_argument(
        "--admission-optimism",
        type=float,
        metavar="FRACTION",
        help="how little room is kept in the cache for what running requests still generate: at 0 "
        "for all that they may, so that none is preempted, at 1 for the least, so that most run at "
        f"once (default: {defaults.admission_optimism})",
    )
    group.add_argument(
        "--policy",
        choices=get_args(Policy),
        help=f"who goes first in a step (default: {defaults.policy})",
    )
    group.add_argument(
        "--prefill-order",
        choices=get_args(PrefillOrder),
        help="whose prompt goes first: first come, shortest remaining, earliest TTFT deadline, or "
        "longest prefix match in the cache (default: edf with a TTFT SLO, else fcfs)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="compute long prompts in chunks (default: yes)",
    )
