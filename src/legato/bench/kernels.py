"""How near the steps of a model come to what the machine can do: its roofline.

A step has to read the weights and the cached keys and values, and to multiply: the longer of the
two is the least that it can take (Williams, Waterman and Patterson, 2009).
"""

import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from legato.core.config import EngineConfig, Kernels
from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import ChunkKind
from legato.core.token_ids import token_array
from legato.engine.startup.build import EngineParts, load_parts
from legato.model.spec import DecoderSpec
from legato.scheduler.step_shape import StepShape

_CONTEXT = 512
_PROMPT = 4096
_DEEP = 6000
_CHUNK = 512
_STREAMS = (1, 8, 32, 64)
_REPEATS = 15
_READ_BYTES = 512 * 2**20
_MATRIX = 2048

OnProgress = Callable[[str], None]


class Roofline(msgspec.Struct, frozen=True):
    """What the machine was seen to do."""

    bytes_a_s: float
    flops_a_s: float

    def least_s(self, work: "Work") -> float:
        return max(work.num_bytes / self.bytes_a_s, work.num_flops / self.flops_a_s)


class Work(msgspec.Struct, frozen=True):
    """What a step cannot do without."""

    num_bytes: float
    num_flops: float


class MeasuredKernel(msgspec.Struct, frozen=True):
    """Attributes: seconds: the median of several steps, sampling included."""

    name: str
    work: Work
    seconds: float


def measure_roofline() -> Roofline:
    """Read a large array, and multiply large bfloat16 matrices, with all of torch's threads."""
    values = torch.ones(_READ_BYTES // 4)
    left, right = torch.ones(2, _MATRIX, _MATRIX, dtype=torch.bfloat16)
    read_s = min(_seconds(values.sum) for _ in range(5))
    multiply_s = min(_seconds(lambda: left @ right) for _ in range(10))
    return Roofline(_READ_BYTES / read_s, 2 * _MATRIX**3 / multiply_s)


def measure_kernels(
    config: EngineConfig, kernels: Kernels, on_progress: OnProgress
) -> tuple[list[MeasuredKernel], float]:
    """Decode steps of several numbers of streams, and prefill chunks, on made-up tokens.

    Returns:
        The steps, and the rate of attention in multiplications and additions a second: of what a
        chunk takes at a deep position beyond one at 0.
    """
    model = msgspec.structs.replace(config.model, kernels=kernels)
    steps = _Steps(load_parts(msgspec.structs.replace(config, model=model)))
    on_progress(f"{kernels}: filling the cache")
    steps.fill()
    measured = []
    for name, chunks in steps.shapes():
        on_progress(f"{kernels}: {name}")
        measured.append(steps.measure(name, chunks))
    first, deep = measured[-2:]
    attention = (deep.work.num_flops - first.work.num_flops) / (deep.seconds - first.seconds)
    return measured, attention


class _Steps:
    """Made-up plans on one executor."""

    def __init__(self, parts: EngineParts) -> None:
        self._executor = parts.executor
        self._spec = parts.spec
        self._model = parts.model
        self._cache = parts.cache
        self._block_size = parts.kv.block_size
        self._known: set[str] = set()
        self._step_id = 0

    def fill(self) -> None:
        """Write what the shapes read: memory that was never written reads faster than it will."""
        for start in range(0, max(_STREAMS) * _CONTEXT, _PROMPT):
            first = start // self._block_size
            for position in range(0, _PROMPT, _CHUNK):
                self._run([self._chunk(f"fill {first}", position, _CHUNK, first)])
        for position in range(0, _DEEP, _CHUNK):
            self._run([self._chunk("deep", position, min(_CHUNK, _DEEP - position), 0)])

    def shapes(self) -> Iterator[tuple[str, list[ScheduledChunk]]]:
        for count in _STREAMS:
            first = range(0, count * _CONTEXT // self._block_size, _CONTEXT // self._block_size)
            rows = [self._chunk(f"row {i}", _CONTEXT - 1, 1, at) for i, at in enumerate(first)]
            yield f"{count} streams at {_CONTEXT:,}", rows
        yield f"{_CHUNK} tokens at 0", [self._chunk("first", 0, _CHUNK, 0)]
        yield f"{_CHUNK} tokens at {_DEEP:,}", [self._chunk("deep", _DEEP, _CHUNK, 0)]

    def measure(self, name: str, chunks: list[ScheduledChunk]) -> MeasuredKernel:
        plan = self._run(chunks)
        times_s = sorted(_seconds(lambda: self._run(chunks)) for _ in range(_REPEATS))
        work = work_of(
            self._spec,
            StepShape.of(plan),
            token_bytes=self._cache.token_bytes,
            weight_bytes=self._model.num_weight_bytes,
        )
        return MeasuredKernel(name, work, times_s[len(times_s) // 2])

    def _chunk(self, name: str, start: int, num_tokens: int, first_block: int) -> ScheduledChunk:
        num_blocks = -(-(start + num_tokens) // self._block_size)
        blocks = tuple(range(first_block, first_block + num_blocks))
        kind: ChunkKind = "decode" if num_tokens == 1 else "prefill"
        return ScheduledChunk(name, start, num_tokens, blocks, 1, kind)

    def _run(self, chunks: list[ScheduledChunk]) -> StepPlan:
        new = [chunk.request_id for chunk in chunks if chunk.request_id not in self._known]
        self._known.update(new)
        self._step_id += 1
        requests = tuple(_request(name) for name in new)
        plan = StepPlan(step_id=self._step_id, chunks=tuple(chunks), new_requests=requests)
        self._executor.submit(plan)
        self._executor.collect()
        return plan


def work_of(spec: DecoderSpec, shape: StepShape, *, token_bytes: int, weight_bytes: int) -> Work:
    """Weights, keys and values that a step reads, and what it multiplies.

    Args:
        token_bytes: of a token's keys and values in the cache.
        weight_bytes: of all weights.
    """
    qkv_size = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (
        qkv_size + spec.num_heads * spec.head_dim + 3 * spec.intermediate_size
    )
    layers, head = spec.num_layers * layer, spec.vocab_size * spec.hidden_size
    num_keys = shape.decode_context + shape.prefill_context
    num_pairs = shape.decode_context + shape.prefill_area
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * num_pairs
    return Work(
        num_bytes=weight_bytes + token_bytes * num_keys,
        num_flops=2 * (layers * shape.num_tokens + head * shape.num_samples) + attention,
    )


def _request(name: str) -> AddRequest:
    tokens = token_array(1000 + 7 * i % 10_000 for i in range(_DEEP + _CHUNK))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=10_000)
    return AddRequest(request_id=name, prompt_token_ids=tokens, params=params)


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
