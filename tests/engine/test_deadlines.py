"""Dropped rows change no token, and the records show them."""

import random
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from legato.cli.explain import explanation
from legato.core.config import SchedulerConfig
from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import EngineRecord, StepRecord
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import VirtualClock
from legato.executor.torch_executor import TorchExecutor
from legato.kv.manager import KVCacheManager
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.perfetto import PerfettoTrace
from legato.observe.traces.request_story import read_story
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.lookup import OwnTokens
from tests.executor.backends import BLOCK_SIZE, EXACT
from tests.executor.by_hand import prompt
from tests.kv.conservation import check_blocks
from tests.model.random_models import decoder_spec
from tests.observe.test_engine_metrics import shown
from tests.scheduler.step_times import calibrate

MAX_LEN = 400
SPEC = decoder_spec(sliding_windows=(None,) * 18, residual_scale=0.3)
COSTS = StepCosts(step_s=0.012, row_s=(4e-4,) * 5, decode_row_s=2e-4, area_s=2e-8, sample_s=1e-4)


class UnsteadyClock(VirtualClock):
    """Moves on whenever an executor reads it, by a time that has nothing to do with a step's rows.

    That happens six times a step, three of them after a group of layers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def tick(self) -> float:
        self.advance_to(self.now_s + self._rng.choice([0.02] * 4 + [0.05]))
        return self.now_s


class FixedBelief(StepTimeModel):
    """Learns nothing from this clock: else it would find that rows cost no time."""

    def observe(self, *_: object) -> None:
        pass


def arrivals() -> dict[int, list[AddRequest | AbortRequest]]:
    """Streams, and prompts beside them; key the step before which they come."""
    coming: dict[int, list[AddRequest | AbortRequest]] = defaultdict(list)
    for i, (step, salt, length, settings) in enumerate(
        [
            (0, 1, 20, {"max_tokens": 40}),
            (0, 2, 9, {"max_tokens": 30}),
            (4, 3, 220, {}),
            (4, 3, 220, {"logprobs": 0}),  # as of `n`: the same prompt, at the same time
            (5, 4, 150, {"prompt_logprobs": 0}),
            (9, 3, 260, {}),  # begins as one before
            (12, 5, 200, {}),
            (14, 6, 180, {}),
            (16, 7, 230, {}),
            (16, 8, 190, {}),
            (18, 3, 240, {}),
        ]
    ):
        params = {"max_tokens": 6, "temperature": 0.0, "seed": i, **settings}
        coming[step].append(
            AddRequest(
                request_id=str(i),
                prompt_token_ids=token_array(prompt(length, salt)),
                params=SamplingParams(**params),
            )
        )
    coming[15].append(AbortRequest(request_id="6"))
    return coming


@cache
def served(
    seed: int, *, drops_rows: bool, num_blocks: int = 80
) -> tuple[dict[str, list[RequestOutput]], list[EngineRecord]]:
    """Return the outputs of each request, and all records."""
    model, attention = EXACT.make(SPEC, num_blocks)
    clock = UnsteadyClock(seed)
    executor = TorchExecutor(model, attention, BLOCK_SIZE, clock=clock.tick)
    kv = KVCacheManager(num_blocks, BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_batched_tokens=96,
        max_num_seqs=6,
        itl_slo_s=0.12,
        admission_optimism=1.0,
        speculative=3,
    )
    step_time = FixedBelief(calibrate(COSTS, MAX_LEN), drops_rows=drops_rows)
    scheduler = Scheduler(
        config.resolve(MAX_LEN),
        max_model_len=MAX_LEN,
        kv=kv,
        step_time=step_time,
        drafters=(OwnTokens(),),
    )
    engine = EngineLoop(scheduler, kv, executor, clock)
    engine.set_recording(is_on=True)
    coming, outputs = arrivals(), defaultdict(list)
    for step in range(2000):
        for output in engine.step(coming.pop(step, [])):
            outputs[output.request_id].append(output)
        check_blocks(kv)
        if not (coming or engine.has_work):
            break
    assert not engine.stats.num_contained_errors
    assert not engine.stats.num_failed_steps
    assert kv.num_free_blocks == kv.num_blocks
    return dict(outputs), engine.take_records()


def steps_of(records: list[EngineRecord]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


@pytest.mark.parametrize("num_blocks", [80, 18])
@pytest.mark.parametrize("seed", range(2))
def test_dropped_rows_show_in_no_output(seed: int, num_blocks: int) -> None:
    """With prefix hits, drafts, scored prompts, an abort, and preemptions where memory is short."""
    expected, plain = served(0, drops_rows=False)
    found, records = served(seed, drops_rows=True, num_blocks=num_blocks)
    assert not any(step.num_dropped_tokens for step in steps_of(plain))
    assert sum(step.num_dropped_tokens > 0 for step in steps_of(records)) > 3
    for request_id, outputs in expected.items():
        tokens, others = (
            [token for output in of_one for token in output.new_token_ids]
            for of_one in (outputs, found[request_id])
        )
        if request_id == "6":  # aborted, by then or later
            assert tokens[: len(others)] == others[: len(tokens)]
            continue
        assert tokens == others
        assert outputs[-1].finish_reason == found[request_id][-1].finish_reason
    for outputs in (expected["4"], found["4"]):
        assert sum(len(output.prompt_logprobs or ()) for output in outputs) == 149


def test_records_account_for_every_row() -> None:
    _, records = served(1, drops_rows=True)
    ends: Counter[str] = Counter()  # key request id
    for step in steps_of(records):
        for request_id, num_cached in step.admitted.items():
            ends[request_id] = num_cached
        for chunk in step.chunks:
            if chunk.kind == "prefill":
                # Others may have computed the same blocks meanwhile.
                assert chunk.start >= ends[chunk.request_id]
                ends[chunk.request_id] = chunk.start + chunk.num_tokens
            if chunk.num_dropped:
                assert (chunk.kind, chunk.ended_by, chunk.num_samples) == ("prefill", "deadline", 0)
            assert (chunk.ended_by == "deadline") == (chunk.num_dropped > 0)
        assert step.went_as_planned == (not step.num_dropped_tokens)


def test_metrics_traces_and_explain_tell_of_dropped_rows(tmp_path: Path) -> None:
    _, records = served(1, drops_rows=True)
    steps = steps_of(records)
    chunks = [chunk for step in steps for chunk in step.chunks if chunk.num_dropped]
    sums = shown(steps)
    dropped = sum(chunk.num_dropped for chunk in chunks)
    assert sums["dropped_prefill_tokens_total"] == dropped > 0
    assert sums["step_time_ratio_count"] == sum(not step.num_dropped_tokens for step in steps)

    header = TraceHeader(started_s=0.0, unix_s=0.0, settings={})
    path = tmp_path / "trace.jsonl"
    trace = JsonlTrace(path, header)
    trace.write(records)
    trace.close()
    request_id, _ = Counter(chunk.request_id for chunk in chunks).most_common(1)[0]
    own = [chunk for chunk in chunks if chunk.request_id == request_id]
    story = read_story(path, request_id)
    told = "\n".join(explanation(story, Attribution(story), 99))
    assert f"{sum(c.num_dropped for c in own)} rows dropped and computed again" in told
    assert f"{len(own)} lost rows for a token's deadline" in told

    picture = tmp_path / "trace.json"
    perfetto = PerfettoTrace(picture, header)
    perfetto.write(records)
    perfetto.close()
    shown_text = picture.read_text()
    assert shown_text.count('"dropped":') == len(chunks)
