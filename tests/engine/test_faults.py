"""Faults of the real model's steps: the requests to blame end, and no other tokens change."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.build.builder import build_engine
from legato.engine.errors import EngineFaultError
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.torch_executor import TorchExecutor
from legato.model.decoder import Decoder
from legato.model.native_kernels import native_instructions
from tests.exact import EXACT_MODEL

BROKEN = SamplingParams(max_tokens=5, seed=0, logit_bias={10**6: 1.0})
"""Names a token that is not there, which the front end would have refused: the sampler raises, when
the step's layers have been computed and its prompts scored."""

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=6),
    "seeded": SamplingParams(temperature=1.0, max_tokens=6, seed=7),
    "penalized": SamplingParams(
        temperature=0.8, max_tokens=6, seed=8, frequency_penalty=1.0, repetition_penalty=1.3
    ),
    "scored": SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1),
}


PROMPT = range(1000, 1210, 7)


def request(request_id: str, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(prompt),
        params=params,
    )


@pytest.fixture(scope="module")
def core() -> EngineLoop:
    config = EngineConfig(
        model=ModelConfig(max_model_len=512, num_threads=1, **EXACT_MODEL),
        cache=CacheConfig(kv_cache_memory_bytes=2**27),
        scheduler=SchedulerConfig(max_num_batched_tokens=100),
    )
    return build_engine(config)[0]


def run(core: EngineLoop, requests: Sequence[AddRequest]) -> dict[str, list[RequestOutput]]:
    """Key request id."""
    outputs = core.step(requests)
    while core.has_work:
        outputs += core.step()
    return {r.request_id: [o for o in outputs if o.request_id == r.request_id] for r in requests}


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def num_scored(outputs: list[RequestOutput]) -> int:
    return sum(len(output.prompt_logprobs or ()) for output in outputs)


def test_a_request_that_breaks_the_sampler_ends_alone(core: EngineLoop) -> None:
    requests = [request(name, params) for name, params in SETTINGS.items()]
    alone = {r.request_id: run(core, [r])[r.request_id] for r in requests}
    # Three prompts fit into a step, so that some decode while others are computed and scored.
    broken = [request(f"broken {i}", BROKEN) for i in range(3)]
    mixed = [broken[0], *requests[:2], broken[1], *requests[2:], broken[2]]
    together = run(core, mixed)
    for name in SETTINGS:
        assert tokens(together[name]) == tokens(alone[name]), name
    assert num_scored(together["scored"]) == 29
    for r in broken:
        [output] = together[r.request_id]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error
        assert output.error.startswith("IndexError")
    assert core.stats.num_failed_steps >= 2
    assert core.stats.kv_usage == 0.0


@pytest.fixture
def tiny(tmp_path: Path) -> EngineLoop:
    """With an embedding that is not its output projection as well."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(tmp_path), dtype="float32", kernels="torch"),
            cache=CacheConfig(kv_cache_memory_bytes=2**22),
        )
    )[0]


def embedding(core: EngineLoop) -> torch.Tensor:
    assert isinstance(core._executor, TorchExecutor)
    assert isinstance(core._executor._model, Decoder)
    return core._executor._model.embed_tokens.weight


def test_a_prompt_that_computes_nan_ends_alone(tiny: EngineLoop) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    sound = [request(str(i), greedy, range(9 * i, 9 * i + 9)) for i in range(1, 4)]
    alone = {r.request_id: tokens(run(tiny, [r])[r.request_id]) for r in sound}
    known = {*chain.from_iterable(alone.values()), *range(40)}
    token_id = next(i for i in range(300, 400) if i not in known)
    embedding(tiny)[token_id] = torch.nan  # memory may fail once it was checked
    broken = request("broken", greedy, [5, token_id, 6])
    together = run(tiny, [sound[0], broken, *sound[1:]])
    assert {r.request_id: tokens(together[r.request_id]) for r in sound} == alone
    [output] = together["broken"]
    assert output.finish_reason is FinishReason.ERROR
    assert "not finite" in (output.error or "")


def test_an_engine_that_computes_nothing_but_nan_ends(tiny: EngineLoop) -> None:
    embedding(tiny).fill_(torch.nan)
    broken = request("broken", SamplingParams(temperature=0.0, max_tokens=6), [5, 6])
    with pytest.raises(EngineFaultError, match="not finite"):
        run(tiny, [broken])


STARVED = """
import json
import resource
import sys
import psutil
import torch
from legato import LLM, SamplingParams

llm = LLM(max_model_len=2048, kv_cache_memory_bytes=2**28, max_num_batched_tokens=1024,
          enable_prefix_caching=False, **json.loads(sys.argv[1]))

def tokens(prompt_len):
    # A cycle goes on, however sums are rounded: int8 kernels round few rows in another way.
    prompts = [{"prompt_token_ids": [1000 + 7 * (i % 20) + j for i in range(prompt_len)]}
               for j in (0, 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    return [g.outputs[0].token_ids for g in llm.generate(prompts, greedy, use_tqdm=False)]

tokens(16)  # what is allocated once, is now
unlimited = resource.getrlimit(resource.RLIMIT_AS)
spare = torch.empty(8 * 2**20, dtype=torch.uint8)  # 1000 rows take 13 MiB and more, 16 rows one
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, unlimited[1]))
ballast = []  # what the allocator has kept for itself
for size in (2**21, 2**20, 2**19):
    try:
        while True:
            ballast.append(torch.empty(size, dtype=torch.uint8))
    except RuntimeError:
        pass
del spare
starved, num_failed_steps = tokens(500), llm.stats.num_failed_steps
resource.setrlimit(resource.RLIMIT_AS, unlimited)
assert starved == [[1000, 1007, 1014], [1001, 1008, 1015]], starved
print(num_failed_steps)
"""


def starved(**flags: Any) -> int:
    """Return how many steps failed of prompts that were computed all the same.

    The process takes 8 MiB at most beyond what it has, and all its threads take them from one
    arena: no memory is left over where the ballast does not go.
    """
    program = [sys.executable, "-c", STARVED, json.dumps(flags)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    found = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    return int(found.stdout)


def test_prompts_are_computed_in_the_memory_that_there_is() -> None:
    assert starved(dtype="float32", kernels="torch", num_threads=1) >= 1


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
@pytest.mark.parametrize(("num_threads", "quantization"), [(2, None), (3, "int8")])
def test_native_threads_run_out_of_memory(num_threads: int, quantization: str | None) -> None:
    """Inside a run of the pool, on any of its threads."""
    kernels = native_instructions()[0]
    flags = {"kernels": kernels, "num_threads": num_threads, "quantization": quantization}
    assert starved(dtype="bfloat16", **flags) >= 1


THREADLESS = """
import resource
import sys
from importlib import import_module
import psutil

extension = import_module(sys.argv[1])
one = extension.ThreadPool(1)
unlimited = resource.getrlimit(resource.RLIMIT_AS)
room = 40 * 2**20  # of some stacks of 8 MiB
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, unlimited[1]))
try:
    extension.ThreadPool(64)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, unlimited)
extension.ThreadPool(4)
"""


@pytest.mark.parametrize("instructions", native_instructions())
def test_a_thread_that_does_not_start(instructions: str) -> None:
    """Is an error; other threads end, and the process lives on."""
    program = [sys.executable, "-c", THREADLESS, f"legato._kernels_{instructions}"]
    found = subprocess.run(program, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert re.fullmatch(r"thread \d+ of 64 does not start: .+", found.stdout.strip())
