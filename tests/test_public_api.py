import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import legato
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig
from legato.core.slo import SloClass
from legato.llm.llm_settings import llm_config


def test_the_public_names_are_these() -> None:
    assert legato.__all__ == [
        "LLM",
        "AsyncEngineArgs",
        "AsyncLLM",
        "SamplingParams",
        "StructuredOutputs",
        "StructuredOutputsParams",
        "__version__",
    ]
    for name in legato.__all__:
        assert getattr(legato, name) is not None


def test_the_methods_of_llm_are_these() -> None:
    public = [name for name in vars(legato.LLM) if not name.startswith("_")]
    assert sorted(public) == [
        "chat",
        "embed",
        "from_config",
        "generate",
        "get_default_sampling_params",
        "get_tokenizer",
        "stats",
        "stream_chat",
        "tokenizer",
    ]


def test_the_methods_of_async_llm_are_these() -> None:
    public = [name for name in vars(legato.AsyncLLM) if not name.startswith("_")]
    assert sorted(public) == [
        "abort",
        "chat",
        "check_health",
        "from_engine_args",
        "generate",
        "get_default_sampling_params",
        "get_tokenizer",
        "shutdown",
        "start",
        "stats",
    ]


def test_the_two_take_the_same_settings_and_conversations() -> None:
    offline, online = (inspect.signature(cls).parameters for cls in (legato.LLM, legato.AsyncLLM))
    assert list(offline) == list(online)
    differing = {name for name in offline if offline[name].default != online[name].default}
    assert differing == {"max_waiting"}, "a server's waiting line has an end"
    of_llm = inspect.signature(legato.LLM.chat).parameters.keys() - {"use_tqdm"}
    of_async = inspect.signature(legato.AsyncLLM.chat).parameters.keys()
    assert of_async - of_llm == {"request_id", "service"}
    assert of_llm <= of_async


def test_the_settings_of_llm_are_these() -> None:
    parameters = inspect.signature(legato.LLM).parameters
    assert list(parameters) == [
        "model",
        "revision",
        "load_format",
        "model_impl",
        "tokenizer",
        "chat_template",
        "dtype",
        "device",
        "max_model_len",
        "num_threads",
        "tensor_parallel_size",
        "quantization",
        "kernels",
        "pooling",
        "speculative_model",
        "block_size",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "take_memory_when_idle",
        "enable_prefix_caching",
        "state_checkpoints",
        "swap_space_bytes",
        "itl_slo_s",
        "itl_slo_quantile",
        "bounds_gaps",
        "tpot_slo_s",
        "ttft_slo_s",
        "slo_classes",
        "shed_load",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_steps_in_flight",
        "max_waiting",
        "max_wait_s",
        "tenant_weights",
        "admission_optimism",
        "policy",
        "prefill_order",
        "enable_chunked_prefill",
        "speculative",
        "speculative_slack",
        "calibrate",
        "calibration_dir",
        "skip_tokenizer_init",
    ]
    assert [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == ["model"]
    assert parameters["block_size"].default is None
    assert parameters["max_waiting"].default == 2**31, "the caller waits for all of them anyway"
    assert "\n    block_size: tokens a block (default: 32; 64 on a GPU)." in str(
        legato.LLM.__init__.__doc__
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocksize", "there is no setting 'blocksize'; did you mean block_size"),
        ("frobnicate", "there is no setting 'frobnicate'$"),
        ("scheduler", "there is no setting 'scheduler'"),
    ],
)
def test_llm_takes_no_other_settings(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        legato.LLM(**{name: 1})


def test_settings_of_llm_reach_their_fields() -> None:
    config, text = llm_config(
        model="m", block_size=8, itl_slo_s=1, slo_classes={"a": {"ttft_s": 2}}
    )
    assert config == EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(
            itl_slo_s=1.0, slo_classes={"a": SloClass(ttft_s=2.0)}, max_waiting=2**31
        ),
    )
    assert not text.skip_tokenizer_init
    config, text = llm_config(max_waiting=3, skip_tokenizer_init=True)
    assert config.scheduler.max_waiting == 3
    assert text.skip_tokenizer_init


PROGRAM = """\
import asyncio
from collections.abc import Sequence

from legato import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputs, __version__

params = SamplingParams(temperature=0.0, max_tokens=16)


def completions(llm: LLM, prompts: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for generation in llm.generate(list(prompts), params, use_tqdm=False):
        identifier: str = generation.request_id
        texts += [f"{identifier} {output.text}" for output in generation.outputs]
    for answer in llm.chat([{"role": "user", "content": "Hello"}], params):
        texts.append(answer.outputs[0].text)
    vector: list[float] = llm.embed(["Hello"])[0].outputs.embedding
    return [*texts, str(len(vector)), __version__]


async def streamed(llm: AsyncLLM) -> str:
    text = ""
    async for generation in llm.generate("Hello", params, "request-1"):
        text = generation.outputs[0].text
    return text


def main() -> None:
    chosen = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    print(completions(LLM(model="smollm2-135m-instruct", num_threads=1), ["Hello"]), chosen)
    print(asyncio.run(streamed(AsyncLLM.from_engine_args(AsyncEngineArgs(model="m")))))
    print(params.temprature)  # a misspelt name must be found
"""
SETTINGS = """\
[mypy]
strict = true
[mypy-torch.*,transformers.*,numpy.*,huggingface_hub.*,fastapi.*,pydantic.*]
follow_imports = skip
"""
"""Without the types of large packages, whose reading would take a minute."""


def test_types_hold_in_a_program_of_a_users(tmp_path: Path) -> None:
    """All of it but its last line, which is wrong, and would pass without types."""
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    error, summary = done.stdout.splitlines()
    assert error.endswith('has no attribute "temprature"; maybe "temperature"?  [attr-defined]')
    assert summary == "Found 1 error in 1 file (checked 1 source file)"
