"""A model that can compute steps: loaded, with its cache and its executor."""

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.core.config import EngineConfig
from legato.core.control_groups import cgroup_cores, usable_cores
from legato.core.rows import RowCounts
from legato.core.version import __version__
from legato.engine.build.blueprint import Blueprint
from legato.engine.calibration.calibration import MOST_DRAFTS
from legato.engine.calibration.step_times import StepTimes
from legato.executor.draft_model import DraftModel
from legato.executor.executor import Executor
from legato.executor.untaken_pages import UntakenPages
from legato.kv.manager import KVCacheManager
from legato.model.model import CacheGroup, CacheSpec, Model
from legato.model.native_kernels import kernels_digest
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec


@dataclass(frozen=True, kw_only=True)
class ModelRuntime:
    """A loaded model with its cache and an executor, before anything is scheduled on it.

    Attributes:
        blueprint: what it was built from.
        cache: what the cache keeps of each token.
        groups: groups of its layers.
        blocks: cache of each group, or rank 0's part of it, [layers, planes, num_blocks, numbers
            of a block].
        states: states of the recurrent layers, [num_slots, ...] each.
        rows: the numbers of rows to which batches are padded.
        kernels: the instruction set of the native kernels, "torch", or "triton" on a GPU.
        untaken: the cache's pages to allocate while the engine is idle; None if there are none.
        draft_model: guesses tokens; None if there is no draft model.
    """

    blueprint: Blueprint
    model: Model
    cache: CacheSpec
    groups: Sequence[CacheGroup]
    kv: KVCacheManager
    executor: Executor
    blocks: Sequence[torch.Tensor]
    rows: RowCounts
    kernels: str
    states: Sequence[torch.Tensor] = ()
    untaken: UntakenPages | None = None
    draft_model: DraftModel | None = None

    @property
    def config(self) -> EngineConfig:
        """The configuration, with every "auto" replaced."""
        return self.blueprint.config

    @property
    def checkpoint(self) -> Checkpoint:
        return self.blueprint.checkpoint

    @property
    def max_model_len(self) -> int:
        return self.blueprint.max_model_len

    @property
    def spec(self) -> DecoderSpec | TransformersSpec:
        return self.checkpoint.spec

    @property
    def weights(self) -> str:
        """How the layers hold the weights, in words."""
        asked, own = self.config.model.quantization, self.checkpoint.quantization
        if asked not in (None, "none", "gguf"):
            return asked
        if not own:
            return "not quantized"
        if self.checkpoint.keeps_codes(asked) and not self.kernels.startswith("torch"):
            return f"{own}, as in the file"
        return f"{own}, widened to {str(self.model.dtype).removeprefix('torch.')}"

    @property
    def step_times(self) -> StepTimes:
        """Measures how long its steps take."""
        return StepTimes(
            self.executor,
            self.kv,
            config=self.config,
            measured_on=_fingerprint(self),
            device_type=self.model.device.type,
            rows=self.rows,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
        )


def _fingerprint(runtime: ModelRuntime) -> dict[str, str]:
    """Return all that step times depend on."""
    config = runtime.config
    has_drafts = config.scheduler.speculative != "off"
    return {
        "model": config.model.model,
        "spec": hashlib.sha256(msgspec.json.encode(runtime.spec)).hexdigest(),
        "dtype": str(runtime.model.dtype),
        "weights": runtime.weights,
        "kernels": runtime.kernels,
        "kv cache": str(runtime.cache.kept_dtype).removeprefix("torch."),
        "device": _device_name(runtime.model.device),
        "cores": _cores(torch.get_num_threads()),
        "build": kernels_digest(runtime.kernels.partition(",")[0]),
        "ranks": str(config.model.tensor_parallel_size),
        "threads": str(torch.get_num_threads()),
        "rows": msgspec.json.encode(runtime.rows).decode(),
        "block size": str(runtime.kv.block_size),
        "max running": str(config.scheduler.max_num_seqs),
        "drafts": f"up to {MOST_DRAFTS} a stream" if has_drafts else "none",
        "versions": f"legato {__version__}, torch {torch.__version__}",
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor_name()} {torch.backends.cpu.get_cpu_capability()}"


def _cores(num_threads: int) -> str:
    """Return the cores that the threads can keep busy, or the share of them that a quota allows.

    Threads with more cores than their quota stand still for a part of each period.
    """
    quota = cgroup_cores()
    return str(usable_cores()) if quota is None or quota >= num_threads else f"{quota:g}"


_IDENTITY = (
    *("model name", "cpu family", "model", "stepping", "cache size"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
"""Lines of /proc/cpuinfo that tell processors apart: names alone are the same for generations of
them on many virtual machines, and ARM has none."""


def _processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model. The host's name would be a container's id, a new one each."""
    with suppress(OSError):
        kinds: dict[str, None] = {}  # of cores, in their order
        for core in cpuinfo.read_text().split("\n\n"):
            lines = (line.partition(":") for line in core.splitlines())
            fields = {name.strip(): value.strip() for name, _, value in lines}
            kinds[" ".join(fields[name] for name in _IDENTITY if fields.get(name))] = None
        kinds.pop("", None)
        if kinds:
            return ", ".join(kinds)
    with suppress(OSError, subprocess.CalledProcessError):  # as on a Mac
        command = ("sysctl", "-n", "machdep.cpu.brand_string")
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return platform.processor() or platform.machine()
