"""Builds an engine from its configuration."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.control_groups import throttling, usable_cores
from legato.core.errors import ConfigError
from legato.core.memory_limits import gibibytes
from legato.core.stats import CacheInfo
from legato.engine.build.blueprint import Blueprint, draw_blueprint
from legato.engine.build.cpu import cpu_runtime
from legato.engine.build.model_report import parameter_sizes
from legato.engine.build.recurrent import check_recurrent, request_costs
from legato.engine.build.runtime import ModelRuntime
from legato.engine.build.start_timer import StartTimer
from legato.engine.build.transfers import cache_layout, cache_memory, make_transfers
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.grammars import Grammars
from legato.engine.process.engine_messages import EngineInfo, TransferAddress
from legato.grammar.matcher import Grammar
from legato.model.model import CacheGroup, CacheSpec
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.lookup import OwnTokens, RecentOutputs

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig, timer: StartTimer | None = None
) -> tuple[EngineLoop, EngineInfo]:
    """Load the model, size the cache, and give both to a scheduler.

    Args:
        timer: measures the parts of the start.

    Returns:
        The engine, and its description for the front end.

    Raises:
        ConfigError: the settings contradict each other, the model or the machine.
        UnsupportedModelError: the checkpoint cannot be run.
    """
    timer = timer or StartTimer()
    grammars = Grammars(config.scheduler.max_waiting)
    runtime = load_runtime(config, grammars.__getitem__, timer)
    step_times = runtime.step_times
    known = step_times.known()
    step_time = StepTimeModel(
        known.trusted, runtime.rows, known.tails, drops_rows=runtime.executor.drops_rows
    )
    scheduler = Scheduler(
        runtime.config.scheduler,
        max_model_len=runtime.max_model_len,
        kv=runtime.kv,
        step_time=step_time,
        drafters=(OwnTokens(), RecentOutputs()),
        draft_model=runtime.draft_model,
    )
    timer.end("calibration")
    info = msgspec.structs.replace(_describe(runtime), start_s=timer.seconds)
    for name, value in info.settings.items():
        logger.debug("%s: %s", name, value)
    warning = throttling(torch.get_num_threads())
    if warning is not None:
        logger.warning("%s", warning)
    transfers = None
    if config.transfer.kv_role is not None:
        layout = cache_layout(
            runtime.checkpoint,
            runtime.cache,
            runtime.groups,
            block_size=runtime.kv.block_size,
            kernels=runtime.kernels,
        )
        memory = cache_memory(runtime.blocks, runtime.states)
        transfers = make_transfers(config.transfer, runtime.kv, memory, layout)
        address = TransferAddress(config.transfer.kv_transfer_host, transfers.port)
        info = msgspec.structs.replace(info, transfer=address)
    engine = EngineLoop(
        scheduler,
        runtime.kv,
        runtime.executor,
        grammars=grammars,
        untaken=runtime.untaken,
        recalibration=step_times.recalibration(step_time, known),
        transfers=transfers,
        at_end=lambda: step_times.keep_learned(step_time),
    )
    return engine, info


def load_runtime(
    config: EngineConfig,
    grammar: Callable[[str], Grammar] | None = None,
    timer: StartTimer | None = None,
) -> ModelRuntime:
    """Load the model and make its cache; raises like `build_engine`.

    Args:
        grammar: returns the grammar of a request's output by the request's id.
        timer: measures the parts of the start.
    """
    blueprint = draw_blueprint(config, grammar, timer or StartTimer())
    check_recurrent(blueprint.config, blueprint.checkpoint.spec, blueprint.device)
    num_threads = blueprint.config.model.num_threads
    assert num_threads is not None, "the configuration was resolved"
    torch.set_num_threads(num_threads)
    return _build_runtime(blueprint)


def _build_runtime(blueprint: Blueprint) -> ModelRuntime:
    is_on_cpu = blueprint.device.type == "cpu"
    if not is_on_cpu:
        _check_compilers()
    if blueprint.config.model.tensor_parallel_size > 1:
        from legato.engine.build.ranks.divided import divided_runtime

        return divided_runtime(blueprint)
    if is_on_cpu:
        return cpu_runtime(blueprint)
    if blueprint.config.model.speculative_model is not None:
        raise ConfigError(
            "a draft model drafts on a CPU: --speculative-model does not go with a GPU, on which "
            "--speculative looks drafts up"
        )
    # Imported only on a GPU: Triton is a large package, and may be missing on other machines.
    from legato.engine.build.gpu import gpu_runtime
    from legato.gpu.device import CudaDevice

    return gpu_runtime(blueprint, CudaDevice(blueprint.device))


def _check_compilers() -> None:
    """Raise `ConfigError` if this machine cannot compile a GPU's kernels.

    Triton builds the program that launches them with a C compiler, before the first launch.
    """
    if torch.version.hip is not None:
        raise ConfigError("GPUs of other makers than NVIDIA are not supported: use --device cpu")
    if find_spec("triton") is None:
        raise ConfigError("a GPU needs Triton: install legato-llm[gpu]")
    named = os.environ.get("CC")  # Triton's first choice
    if not any(map(shutil.which, ("gcc", "clang") if named is None else (named,))):
        raise ConfigError("a GPU needs a C compiler for Triton: install gcc, or name one in CC")
    if not Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h").exists():
        raise ConfigError("a GPU needs Python's headers for Triton: install python3-dev")


def _describe(runtime: ModelRuntime) -> EngineInfo:
    config, model, kv = runtime.config, runtime.model, runtime.kv
    num_ranks, draft_model = config.model.tensor_parallel_size, config.model.speculative_model
    num_cache_tokens = kv.num_blocks * kv.block_size
    cache_bytes = sum(
        count * kv.block_size * group.cache.token_bytes
        for count, group in zip(kv.group_sizes, runtime.groups, strict=True)
    )
    cut_sizes = _cut_sizes(runtime, cache_bytes)
    for flag, how in cut_sizes.items():
        logger.warning("%s is cut: %s", flag, how)
    return EngineInfo(
        model=config.model.model,
        served_model_names=(config.model.model,),
        max_model_len=runtime.max_model_len,
        device=model.device.type,
        vocab_size=runtime.spec.vocab_size,
        cache=CacheInfo(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            dtype=_name(runtime.cache.kept_dtype),
            enable_prefix_caching=config.cache.enable_prefix_caching,
            windows=tuple(group.window for group in runtime.groups if group.window is not None),
        ),
        scheduler=config.scheduler,
        rejected_kernels=runtime.blueprint.kernels.rejected,
        cut_sizes=cut_sizes,
        hidden_size=runtime.spec.hidden_size,
        generates=runtime.checkpoint.generates,
        architecture=runtime.checkpoint.architecture,
        num_parameters=sum(parameter_sizes(runtime.checkpoint).values()),
        weight_bytes=sum(runtime.checkpoint.kept_bytes.values()),
        quantization=runtime.checkpoint.quantization or _name(model.dtype),
        cache_bytes=cache_bytes,
        num_labels=runtime.checkpoint.num_labels,
        pooling=runtime.blueprint.pooling,
        settings={
            "model": config.model.model,
            "dtype": _name(model.dtype),
            "device": str(model.device),
            "threads": _threads(torch.get_num_threads()),
            **({"ranks": str(num_ranks)} if num_ranks > 1 else {}),
            **({"draft model": draft_model} if draft_model is not None else {}),
            "weights": runtime.weights,
            "kernels": runtime.kernels,
            "max model length": f"{runtime.max_model_len:,} tokens",
            "KV cache": f"{kv.num_blocks:,} blocks, {num_cache_tokens:,} tokens, "
            f"{cache_bytes / 2**30:.2f} GiB, {_name(runtime.cache.kept_dtype)}",
            **request_costs(runtime.blueprint, runtime.cache, kv),
            **_windows(runtime),
            "prefix caching": "on" if config.cache.enable_prefix_caching else "off",
            "policy": config.scheduler.policy,
            "chunked prefill": "on" if config.scheduler.enable_chunked_prefill else "off",
            "step budget": _step_budget(config.scheduler),
            "prefill order": f"{config.scheduler.prefill_order}",
            **{f"class {name}": str(slo) for name, slo in config.scheduler.classes.items()},
            "max running": f"{config.scheduler.max_num_seqs}",
            "steps in flight": f"{config.scheduler.num_steps_in_flight}",
            "speculation": f"{config.scheduler.speculative}",
            "pooling": runtime.blueprint.pooling,
        },
    )


def _cut_sizes(runtime: ModelRuntime, cache_bytes: int) -> dict[str, str]:
    """Return how sizes were cut to what can be used; key the flag."""
    asked_bytes, kv = runtime.config.cache.kv_cache_memory_bytes, runtime.kv
    max_num_seqs = runtime.blueprint.max_num_seqs
    if asked_bytes is None or kv.num_blocks < runtime.blueprint.blocks_per_request * max_num_seqs:
        return {}
    taken_bytes = cache_bytes + kv.num_states * runtime.blueprint.state_bytes
    if runtime.draft_model is not None:
        taken_bytes += runtime.draft_model.cache_bytes
    unit_bytes = max(cache_bytes // kv.num_blocks, runtime.blueprint.state_bytes)
    if asked_bytes - taken_bytes < unit_bytes:  # the rest would hold no more block
        return {}
    return {
        "--kv-cache-memory": f"{gibibytes(taken_bytes)} of {gibibytes(asked_bytes)} are taken, "
        f"since {max_num_seqs:,} running requests of {runtime.max_model_len:,} tokens fill no more"
    }


def _threads(count: int) -> str:
    """Return the number of threads, and of cores if this process may not use all."""
    cores, usable = os.cpu_count() or 1, usable_cores()
    if usable == cores:
        return str(count)
    return f"{count}, on {usable} of {cores} cores that affinity and control groups allow"


def _windows(runtime: ModelRuntime) -> dict[str, str]:
    """Return the window groups of the cache; empty if all layers keep all tokens."""
    sizes = zip(runtime.groups[1:], runtime.kv.group_sizes[1:], strict=True)
    return {
        f"window of {group.window:,} tokens{_key_shape(runtime.cache, group)}": (
            f"{len(group.layers)} layers, {count:,} blocks"
        )
        for group, count in sizes
    }


def _key_shape(cache: CacheSpec, group: CacheGroup) -> str:
    """Describe the keys of a group's layers, if those of other groups have another shape."""
    if cache.has_one_geometry:
        return ""
    return f", keys of {group.cache.num_kv_heads} x {group.cache.head_dim}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _step_budget(config: SchedulerConfig) -> str:
    tokens = f"{config.max_num_batched_tokens:,} tokens"
    if config.promises_pace:
        return f"what the SLOs allow, up to {tokens}"
    cuts_prompts = config.policy == "stall-free" and config.enable_chunked_prefill
    if config.bounds_gaps and cuts_prompts:
        return f"what streams do not notice, up to {tokens}"
    return tokens
