"""Executors of a GPU's room, and engines on them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from legato.core.config import SchedulerConfig
from legato.core.outputs import RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.executor import Executor
from legato.executor.state_cache import StateCache
from legato.gpu.decoder import GpuDecoder
from legato.gpu.device import CudaDevice, Device
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.step_program import StepProgram
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import StateSlots
from legato.model.decoder import Decoder
from legato.scheduler.scheduler import Scheduler
from legato.speculation.drafter import Drafter
from tests.engine.tokens import tokens_of
from tests.gpu.host_twin import HostTwin

MAX_LEN = 64


def device_here() -> Device:
    """A GPU, or what stands in for it."""
    return CudaDevice(torch.device("cuda")) if torch.cuda.is_available() else HostTwin()


def make_executor(
    plain: Decoder,
    *,
    block_size: int,
    num_blocks: int,
    device: Device | None = None,
    max_len: int = MAX_LEN,
    max_rows: int = 160,
    num_states: int = 32,
    has_quantized_cache: bool = False,
    has_groups: bool = False,
    **options: Any,
) -> tuple[GpuExecutor, StepProgram]:
    """On the weights of a decoder, and a cache that holds no numbers yet.

    Args:
        has_groups: layers are grouped by what they keep; else, all are in one group.
    """
    device, spec = device or device_here(), plain.spec
    model = GpuDecoder(spec, dtype=plain.dtype, device=device.torch_device)
    model.load_weights(plain.checkpoint_slots().items())
    cache = replace(model.cache, is_quantized=has_quantized_cache)
    groups = cache.groups(max_len) if has_groups else (cache.whole,)
    blocks = [
        torch.full(
            (
                own.num_layers,
                2,
                num_blocks,
                block_size * own.layer_numbers * own.kept_dtype.itemsize // plain.dtype.itemsize,
            ),
            torch.nan,
            dtype=plain.dtype,
            device=device.torch_device,
        ).view(own.kept_dtype)
        for own in (group.cache for group in groups)
    ]
    states: StateCache | None = None
    if shapes := spec.states:
        place = device.torch_device
        states = StateCache(shapes, num_slots=num_states, dtype=plain.dtype, device=place)
    program = StepProgram(
        model,
        groups,
        blocks,
        device,
        block_size=block_size,
        num_slots=8,
        max_blocks=-(-max_len // block_size),
        max_rows=max_rows,
        max_samples=16,
        states=states,
    )
    return GpuExecutor(program, device, **options), program


class Engine(EngineLoop):
    """Attributes: `outputs`: all that came, in order."""

    def __init__(
        self,
        executor: Executor,
        *,
        block_size: int,
        num_blocks: int,
        drafters: Sequence[Drafter] = (),
        states: StateSlots | None = None,
        max_len: int = MAX_LEN,
        **settings: Any,
    ) -> None:
        kv = KVCacheManager(
            num_blocks, block_size, num_host_slots=settings.pop("num_slots", 0), states=states
        )
        config = SchedulerConfig(**settings).resolve(max_len)
        scheduler = Scheduler(config, max_model_len=max_len, kv=kv, drafters=drafters)
        super().__init__(scheduler, kv, executor)
        self.outputs: list[RequestOutput] = []

    def run(self, requests: Sequence[AddRequest] = ()) -> dict[str, list[int]]:
        """Until nothing is left to do; the tokens of all requests so far, by id."""
        self.outputs += self.step(requests)
        while self.has_work:
            self.outputs += self.step()
        return tokens_of(self.outputs)


def request(
    request_id: str, prompt: Sequence[int], eos_token_ids: tuple[int, ...] = (), **params: Any
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(prompt),
        params=SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 8, **params}),
        eos_token_ids=eos_token_ids,
    )
