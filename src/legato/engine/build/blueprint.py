"""The blueprint of an engine: its configuration, resolved for this machine and this model."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.loader import open_checkpoint, resolve_dtype
from legato.checkpoint.pooling import checkpoint_pooling
from legato.checkpoint.source import configured_source
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, Kernels, ModelConfig
from legato.core.control_groups import usable_cores
from legato.core.errors import ConfigError
from legato.core.memory_limits import check_size, memory_bytes
from legato.core.pooling import Pooling
from legato.engine.build.start_timer import StartTimer
from legato.engine.calibration.calibration import SHORTEST_CHUNK
from legato.executor.kernel_check import KernelChoice, choose_kernels
from legato.grammar.matcher import Grammar
from legato.model.native_kernels import native_instructions
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec


@dataclass(frozen=True)
class Blueprint:
    """The engine to build, before anything is loaded.

    Attributes:
        config: the configuration, with every "auto" replaced.
        dtype: dtype of the weights.
        kernels: the native kernels that agree with PyTorch's on this machine.
        grammar: returns the grammar of a request's output by the request's id; None if no request
            has a grammar.
        timer: measures the parts of the start.
        pooling: how prompts become vectors.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kernels: KernelChoice
    grammar: Callable[[str], Grammar] | None
    timer: StartTimer
    pooling: Pooling

    @property
    def score_head(self) -> torch.Tensor | None:
        """The checkpoint's classification head [labels, E]; None without one."""
        read = self.checkpoint.read_head
        return None if read is None else read()

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once."""
        count = self.config.scheduler.max_num_seqs
        assert count is not None
        return count

    @property
    def max_samples(self) -> int:
        """Most rows of a step that are sampled."""
        return self.config.scheduler.most_samples

    @property
    def max_rows(self) -> int:
        """Most rows of a step, steps of a calibration included."""
        budget = self.config.scheduler.max_num_batched_tokens
        assert budget is not None
        return max(budget, SHORTEST_CHUNK) + self.max_num_seqs

    @property
    def state_bytes(self) -> int:
        """Size of the states of a request, of all layers and ranks; 0 without recurrent layers."""
        num_ranks = self.config.model.tensor_parallel_size
        states = self.checkpoint.spec.part(num_ranks).states
        return num_ranks * sum(shape.num_bytes(self.dtype) for shape in states)

    @property
    def block_size(self) -> int:
        """Tokens of a block of the cache."""
        size = self.config.cache.block_size
        assert size is not None
        return size

    @property
    def blocks_per_request(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)


def draw_blueprint(
    config: EngineConfig, grammar: Callable[[str], Grammar] | None, timer: StartTimer
) -> Blueprint:
    """Find the model, and replace every "auto".

    Raises:
        ConfigError: the settings contradict each other, the model or the machine.
        UnsupportedModelError: the checkpoint cannot be run.
    """
    device = resolve_device(config.model.device)
    _check_sizes(config.cache, device)
    with ThreadPoolExecutor(1) as thread:
        kernels = thread.submit(choose_kernels, _native_candidates(config.model.kernels, device))
        checkpoint = open_checkpoint(config.model)
    if isinstance(checkpoint.spec, TransformersSpec) and device.type != "cpu":
        raise ConfigError(
            "transformers' layers run on a CPU alone, not in a GPU's graphs: this model needs "
            "--device cpu"
        )
    max_model_len = _within_model(config.model.max_model_len, checkpoint.spec)
    resolved = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, num_threads=_num_threads(config.model)),
        scheduler=config.scheduler.resolve(max_model_len, device.type),
        cache=config.cache.resolve(device.type),
    )
    return Blueprint(
        resolved,
        checkpoint,
        resolve_dtype(config.model, checkpoint),
        device,
        max_model_len,
        kernels.result(),
        grammar,
        timer,
        config.model.pooling or checkpoint_pooling(configured_source(config.model)) or "last",
    )


def model_context(config: ModelConfig) -> int:
    """Return the longest prompt plus output in tokens, without loading the model.

    Raises:
        ConfigError: there is no such model, or it contradicts the configuration.
        UnsupportedModelError: the checkpoint cannot be run.
    """
    return _within_model(config.max_model_len, open_checkpoint(config).spec)


def resolve_device(name: str) -> torch.device:
    """Return the device, for "auto" a GPU if there is one; raises `ConfigError` without it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


def _num_threads(config: ModelConfig) -> int:
    """Return the threads of the forward pass, of all ranks together."""
    return config.num_threads or min(torch.get_num_threads(), usable_cores())


def _check_sizes(config: CacheConfig, device: torch.device) -> None:
    """Raises `ConfigError` for a size of host memory that this machine cannot have."""
    if device.type == "cpu":
        check_size("--kv-cache-memory", config.kv_cache_memory_bytes or 0, memory_bytes())
    check_size("--swap-space", config.swap_space_bytes, memory_bytes())


def _native_candidates(asked: Kernels, device: torch.device) -> list[str]:
    """Return the instruction sets whose kernels may run the model, the best first."""
    if device.type != "cpu":
        return []
    found = native_instructions()
    # Whether plain kernels are faster than PyTorch's was not measured on any processor.
    return [name for name in found if asked == name or (asked == "auto" and name != "plain")]


def _within_model(max_model_len: int | None, spec: DecoderSpec | TransformersSpec) -> int:
    """Return the longest prompt plus output; raises `ConfigError` if the model has less."""
    if max_model_len is None:
        return spec.max_model_len
    if not 1 < max_model_len <= spec.max_model_len:
        raise ConfigError(
            f"max_model_len must be in [2, {spec.max_model_len}] for this model, "
            f"got {max_model_len}"
        )
    return max_model_len
