"""A replay without a prompt plans as the real engine does without it."""

import time
from pathlib import Path

from transformers import LlamaConfig

from legato.core.config import EngineConfig
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import EngineRecord, StepRecord
from legato.core.token_ids import token_array
from legato.engine.build.builder import build_engine
from legato.engine.replay.counterfactuals import counterfactuals
from legato.engine.replay.replay import Replay, Token, Without
from legato.engine.replay.window import Signature, Window, signature
from legato.observe.traces.trace_file import JsonlTrace, ReplayBasis, TraceHeader
from tests.checkpoint.test_dummy import described
from tests.model.conftest import TINY

_LATE, _BEFORE = "late", 8


def run(folder: Path, *, has_prompt: bool) -> tuple[list[EngineRecord], ReplayBasis]:
    """Run a stream, beside which a long prompt comes unless `has_prompt` is false."""
    engine, info = build_engine(
        EngineConfig.of(
            model=str(described(folder / "model", LlamaConfig(**TINY))),
            load_format="dummy",
            dtype="float32",
            kernels="torch",
            device="cpu",
            kv_cache_memory_bytes=2**22,
            enable_prefix_caching=False,
            speculative="off",
            max_num_batched_tokens=16,
        )
    )
    engine.set_recording(is_on=True)

    def request(name: str, num_tokens: int) -> AddRequest:
        return AddRequest(
            request_id=name,
            prompt_token_ids=token_array([1] * num_tokens),
            params=SamplingParams(max_tokens=20, temperature=0.0),
            arrival_time_s=time.monotonic(),
        )

    records: list[EngineRecord] = []
    for step in range(40):
        events = [request(_LATE, 3)] if step == 0 else []
        if step == _BEFORE and has_prompt:
            events.append(request("long", 50))
        engine.step(events)
        records += engine.take_records()
    basis = ReplayBasis(
        scheduler=info.scheduler,
        max_model_len=info.max_model_len,
        num_blocks=info.cache.num_blocks,
        block_size=info.cache.block_size,
    )
    return records, basis


def plans(records: list[EngineRecord]) -> list[Signature]:
    return [signature(record.chunks) for record in records if isinstance(record, StepRecord)]


def test_plans_are_those_of_the_engine(tmp_path: Path) -> None:
    recorded, basis = run(tmp_path, has_prompt=True)
    without, _ = run(tmp_path, has_prompt=False)
    header = TraceHeader(started_s=0.0, unix_s=None, settings={}, basis=basis)
    trace = JsonlTrace(tmp_path / "t.jsonl", header)
    trace.write(recorded)
    trace.close()
    steps = [record for record in recorded if isinstance(record, StepRecord)]
    before, own = steps[_BEFORE - 1 : _BEFORE + 1]
    assert any(chunk.request_id == "long" for chunk in own.chunks)
    token = Token(_LATE, _BEFORE)
    told = counterfactuals(tmp_path / "t.jsonl", token, before.ended_s, own.ended_s)
    assert told.num_agreeing == told.num_steps
    assert [one.without for one in told.found if "prompt" in one.without] == ["without prompt long"]
    replay = Replay(Window(tmp_path / "t.jsonl", steps[18].ended_s), 0, Token(_LATE, 18))
    assert replay.run(Without(), 100).plans == plans(recorded)[:19]
    assert replay.run(Without(request_id="long"), 100).plans == plans(without)[:19]
