"""Says what a start would do here: memory, context, refusals, and the speed that a probe expects.

The probe loads the first layers alone, as they would run, and measures steps for about a second.
The times of all layers are those of the first, by the layers' sizes.
"""

import math
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.described import weight_shapes
from legato.checkpoint.loader import check_quantization
from legato.core.config import EngineConfig, Quantization
from legato.core.control_groups import usable_cores
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.memory_limits import free_memory_bytes, gibibytes
from legato.core.serve_flags import command_line, serve_flags
from legato.engine.build.blueprint import Blueprint, draw_blueprint
from legato.engine.build.cpu import cpu_runtime
from legato.engine.build.cpu_model import native_kernels
from legato.engine.build.draft import draft_blueprint
from legato.engine.build.kv_cache import configured_cache, make_kv_manager
from legato.engine.build.model_report import (
    ModelReport,
    embedding_of,
    parameter_sizes,
    report_model,
    widened_weight_bytes,
)
from legato.engine.build.recurrent import check_recurrent
from legato.engine.build.start_timer import StartTimer
from legato.executor.cache_memory import cpu_cache_bytes
from legato.model.model import NamedWeights
from legato.model.spec import DecoderSpec

_PROBE_S = 1.0
_PROBED_BYTES = 512 * 2**20
"""Weights that a probe reads at most, if layers are that small: larger than a cache."""
_PROBED_TOKENS = 1024
_PROBED_CACHE_BYTES = 256 * 2**20
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_BYTES_OF_BITS = {8: 34 / 32, 4: 18 / 32}
"""Bytes of a value in blocks of 32 with a scale; key the bits."""
_BITS: dict[Quantization | None, int] = {"int8": 8, "w8a8": 8, "int4": 4, "w4a8": 4}
_ROWS_OF_A_STEP = 8
"""Rows of the hidden size that a step keeps for each of its tokens, roughly."""


class Speed(msgspec.Struct, frozen=True):
    """What a probe expects of one stream without drafts.

    Attributes:
        token_s: seconds between two tokens.
        prompt_tokens_s: tokens of a prompt computed in a second.
        num_layers: layers that were measured.
    """

    token_s: float
    prompt_tokens_s: float
    num_layers: int


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a start would do here.

    Attributes:
        kernels: the instruction set of native kernels, "torch", or "triton" on a GPU; empty if
            none can run.
        weight_bytes, cache_bytes, step_bytes: memory of weights, cache and the largest step.
        cache_tokens: tokens that the cache holds.
        speed: None if it was not measured; `unmeasured` says why.
        command: the command line with every default replaced.
        refusals: why the start would fail; empty if it would not.
    """

    processor: str
    threads: int
    device: str
    kernels: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    weight_bytes: int
    cache_bytes: int
    cache_tokens: int
    step_bytes: int
    free_bytes: int
    command: str
    speed: Speed | None = None
    unmeasured: str = ""
    refusals: tuple[str, ...] = ()


def dry_run(config: EngineConfig) -> DryRun:
    """Resolve a configuration for this machine, and measure its first layers.

    Raises:
        ConfigError: the settings contradict each other, the model or the machine.
        UnsupportedModelError: Legato cannot run the model.
    """
    blueprint = draw_blueprint(config, None, StartTimer())
    report = report_model(config.model)
    refusals: list[str] = []
    with _noting(refusals):
        check_recurrent(blueprint.config, blueprint.checkpoint.spec, blueprint.device)
    threads = blueprint.config.model.num_threads
    assert threads is not None, "the configuration was resolved"
    torch.set_num_threads(threads)
    is_on_cpu = blueprint.device.type == "cpu"
    kernels = "" if is_on_cpu else "triton"
    if is_on_cpu:
        with _noting(refusals):
            native = native_kernels(blueprint)
            kernels = "torch" if native is None else native.instructions
        if config.model.speculative_model is not None:
            with _noting(refusals):
                draft_blueprint(blueprint, config.model.speculative_model)
    if kernels:
        with _noting(refusals):
            check_quantization(
                config.model.quantization, blueprint.device, has_kernels=kernels != "torch"
            )
    weight_bytes = _weight_bytes(blueprint, report, kernels)
    free_bytes = free_memory_bytes() if is_on_cpu else torch.cuda.mem_get_info(blueprint.device)[0]
    if weight_bytes > free_bytes:
        refusals.append(
            f"weights take {gibibytes(weight_bytes)}, and {gibibytes(free_bytes)} are free: "
            "--quantization makes them smaller"
        )
    cache_bytes, cache_tokens = 0, 0
    with _noting(refusals):
        cache_bytes, cache_tokens = _cache(blueprint, weight_bytes, free_bytes)
    speed, unmeasured = None, "only a CPU is probed" if not is_on_cpu else ""
    if is_on_cpu and not refusals:
        try:
            speed = _probe(blueprint)
        except (ConfigError, UnsupportedModelError) as error:
            unmeasured = str(error)
    return DryRun(
        processor=processor_name() if is_on_cpu else torch.cuda.get_device_name(blueprint.device),
        threads=threads,
        device=blueprint.device.type,
        kernels=kernels,
        dtype=str(blueprint.dtype).removeprefix("torch."),
        max_model_len=blueprint.max_model_len,
        max_num_seqs=blueprint.max_num_seqs,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        cache_tokens=cache_tokens,
        step_bytes=_step_bytes(blueprint),
        free_bytes=free_bytes,
        command=_command(blueprint),
        speed=speed,
        unmeasured=unmeasured,
        refusals=tuple(refusals),
    )


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = name if found is None else found[1]
    return f"{name}, {usable_cores()} of {os.cpu_count()} cores"


def first_layers(checkpoint: Checkpoint, count: int) -> Checkpoint:
    """Return a checkpoint of a model's first layers, which reads no others.

    Raises:
        UnsupportedModelError: so few layers are no model, such as recurrent layers alone.
    """
    whole = checkpoint.decoder_spec
    spec = msgspec.structs.replace(whole, layers=whole.layers[:count])
    needed = weight_shapes(spec)
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name in needed}

    def tensors(device: torch.device) -> NamedWeights:
        left = set(shapes)
        for name, tensor in checkpoint.tensors(device):
            if name in left:
                left.remove(name)
                yield name, tensor
            if not left:
                return

    return replace(checkpoint, spec=spec, shapes=shapes, tensors=tensors)


@contextmanager
def _noting(refusals: list[str]) -> Iterator[None]:
    try:
        yield
    except (ConfigError, UnsupportedModelError) as error:
        if str(error) not in refusals:
            refusals.append(str(error))


def _weight_bytes(blueprint: Blueprint, report: ModelReport, kernels: str) -> int:
    """Return the memory of the weights; PyTorch's layers widen quantized ones."""
    quantization, checkpoint = blueprint.config.model.quantization, blueprint.checkpoint
    if kernels != "torch" and quantization in _BITS:
        return _rounded_weight_bytes(checkpoint, blueprint.dtype, _BITS[quantization])
    if kernels != "torch" and checkpoint.keeps_codes(quantization):
        return report.weight_bytes
    return widened_weight_bytes(checkpoint, blueprint.dtype)


def _rounded_weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, bits: int) -> int:
    """Return the memory of weights rounded at the start; the embedding stays plain.

    The output projection has 8 bits, also where it is a copy of the embedding.
    """
    sizes, spec = parameter_sizes(checkpoint), checkpoint.spec
    embedding = sizes.pop(embedding_of(spec))
    head = embedding if spec.tie_word_embeddings else sizes.pop(_HEADS[0], 0)
    codes = head * _BYTES_OF_BITS[8] + sum(sizes.values()) * _BYTES_OF_BITS[bits]
    return embedding * dtype.itemsize + int(codes)


def _cache(blueprint: Blueprint, weight_bytes: int, free_bytes: int) -> tuple[int, int]:
    """Return the size of the cache in bytes and in tokens; raises like `make_kv_manager`."""
    config = blueprint.config.cache
    cache = configured_cache(blueprint, blueprint.checkpoint.spec.cache(blueprint.dtype))
    num_bytes = config.kv_cache_memory_bytes
    if num_bytes is None:
        share = cpu_cache_bytes(config) / free_memory_bytes()
        num_bytes = max(1, int((free_bytes - weight_bytes) * share))
    groups = cache.groups(blueprint.max_model_len)
    kv = make_kv_manager(blueprint, groups, num_bytes)
    taken = sum(
        size * kv.block_size * group.cache.token_bytes
        for size, group in zip(kv.group_sizes, groups, strict=True)
    )
    return taken + kv.num_states * blueprint.state_bytes, kv.num_blocks * kv.block_size


def _step_bytes(blueprint: Blueprint) -> int:
    """Return the memory of the largest step: activations, and float32 logits of sampled rows."""
    spec = blueprint.checkpoint.spec
    activations = blueprint.max_rows * _ROWS_OF_A_STEP * spec.hidden_size * blueprint.dtype.itemsize
    return activations + blueprint.max_samples * spec.vocab_size * torch.float32.itemsize


def _command(blueprint: Blueprint) -> str:
    config = blueprint.config
    model = msgspec.structs.replace(
        config.model,
        dtype=str(blueprint.dtype).removeprefix("torch."),
        device=blueprint.device.type,
        max_model_len=blueprint.max_model_len,
    )
    return command_line(serve_flags(msgspec.structs.replace(config, model=model)))


def _probe(blueprint: Blueprint) -> Speed:
    """Load the first layers and measure their steps; raises like `build_engine`."""
    checkpoint = blueprint.checkpoint
    sizes = _layer_bytes(checkpoint)
    part = _probed_part(checkpoint, sizes)
    num_layers = part.spec.num_layers
    cache = msgspec.structs.replace(
        blueprint.config.cache,
        kv_cache_memory_bytes=_PROBED_CACHE_BYTES,
        gpu_memory_utilization=None,
        state_checkpoints=None,
        swap_space_bytes=0,
    )
    model = msgspec.structs.replace(
        blueprint.config.model, speculative_model=None, tensor_parallel_size=1
    )
    config = msgspec.structs.replace(blueprint.config, cache=cache, model=model)
    runtime = cpu_runtime(
        replace(
            blueprint,
            checkpoint=part,
            config=config,
            max_model_len=min(blueprint.max_model_len, _PROBED_TOKENS),
            timer=StartTimer(),
        )
    )
    decode_s, prompt_token_s = math.inf, math.inf
    ends_s = math.inf
    for shape, seconds in runtime.step_times.calibration().steps():
        if not shape.num_prefill_tokens and shape.num_decode_rows == 1:
            decode_s = min(decode_s, seconds)
            ends_s = min(ends_s, time.monotonic() + _PROBE_S)
        elif not shape.num_decode_rows:
            prompt_token_s = min(prompt_token_s, seconds / shape.num_prefill_tokens)
        if time.monotonic() > ends_s:
            break
    head_bytes = max(
        (math.prod(checkpoint.shapes[name]) for name in _HEADS if name in checkpoint.shapes),
        default=0,
    )
    measured, whole = sum(sizes[:num_layers]), sum(sizes)
    head_s = decode_s * head_bytes / (head_bytes + measured)
    scale = whole / measured
    return Speed(head_s + (decode_s - head_s) * scale, 1 / (prompt_token_s * scale), num_layers)


def _layer_bytes(checkpoint: Checkpoint) -> list[int]:
    """Return the number of values of each layer, those of experts that compute a token alone."""
    spec = checkpoint.spec
    sizes = [0] * spec.num_layers
    for name, shape in checkpoint.shapes.items():
        if (found := _LAYER.match(name)) is None or int(found[1]) >= len(sizes):
            continue
        index, size = int(found[1]), math.prod(shape)
        layer = spec.layers[index] if isinstance(spec, DecoderSpec) else None
        if layer is not None and layer.moe is not None and ".mlp.experts." in name:
            size = size * layer.moe.num_active // layer.moe.num_experts
        sizes[index] += size
    return sizes


def _probed_part(checkpoint: Checkpoint, sizes: list[int]) -> Checkpoint:
    """Return the first layers, as many as make a probe, or the whole of a small model.

    Raises:
        ConfigError: the layers cannot be loaded apart, and are too large to be loaded for a probe.
    """
    spec = checkpoint.spec
    stored = sum(math.prod(s) for s in checkpoint.shapes.values()) * checkpoint.dtype.itemsize
    if stored <= _PROBED_BYTES or not sum(sizes):
        return checkpoint
    if not isinstance(spec, DecoderSpec) or spec.layer_inputs is not None:
        raise ConfigError("this model's first layers cannot be loaded alone")
    share = _PROBED_BYTES / stored
    for count in range(max(1, int(share * len(sizes))), len(sizes) + 1):
        try:
            part = first_layers(checkpoint, count)
        except UnsupportedModelError:
            continue
        if bool(part.decoder_spec.states) == bool(spec.states):
            return part
    return checkpoint
