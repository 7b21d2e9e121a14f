"""The textbook's example by the engine's own scheduler: two short prompts, four tokens a step.

Chunked prefill is usually explained by it (Agrawal et al., Sarathi-Serve, OSDI 2024): the contents
of steps of a fixed number of tokens, when prompts of 10 and of 6 tokens come together.
"""

from rich.table import Table

from legato.core.config import Policy, SchedulerConfig
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import ChunkRecord, StepRecord
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler

PROMPTS = {"R1": 10, "R2": 6}
"""Key the request's name, value the tokens of its prompt."""
NUM_OUTPUT_TOKENS = 4
BUDGET = 4

_BLOCK_SIZE = 4
_NUM_BLOCKS = 32
_MAX_MODEL_LEN = 64
_STEP_S = 0.01
_TITLES: dict[Policy, str] = {
    "prefill-first": "Prefill first: R1 waits while R2's prompt is computed",
    "stall-free": "Stall-free: R1 goes on, and R2's prompt gets what is left of each step",
}


def toy_tables() -> list[Table]:
    """Return a table of each policy's steps: the tokens of each request."""
    return [_table(title, toy_steps(policy)) for policy, title in _TITLES.items()]


def toy_steps(policy: Policy) -> list[StepRecord]:
    """Return the steps that serve the prompts when they come together."""
    config = SchedulerConfig(
        policy=policy, max_num_batched_tokens=BUDGET, prefill_order="fcfs"
    ).resolve(_MAX_MODEL_LEN)
    kv = KVCacheManager(_NUM_BLOCKS, _BLOCK_SIZE)
    clock = VirtualClock()
    engine = EngineLoop(
        Scheduler(config, max_model_len=_MAX_MODEL_LEN, kv=kv),
        kv,
        SimulatedExecutor(clock, lambda _: _STEP_S),
        clock,
    )
    engine.set_recording(is_on=True)
    engine.apply([_request(name, length) for name, length in PROMPTS.items()])
    while engine.has_work:
        engine.step()
    return [record for record in engine.take_records() if isinstance(record, StepRecord)]


def _table(title: str, steps: list[StepRecord]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("step", justify="right")
    for name in PROMPTS:
        table.add_column(name)
    table.add_column("tokens", justify="right")
    for index, step in enumerate(steps, start=1):
        cells = {chunk.request_id: _cell(chunk) for chunk in step.chunks}
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        table.add_row(str(index), *(cells.get(name, "") for name in PROMPTS), str(num_tokens))
    return table


def _cell(chunk: ChunkRecord) -> str:
    """Describe a chunk: the computed part of the prompt, half-open, and the token it samples."""
    prompt_len = PROMPTS[chunk.request_id]
    end = chunk.start + chunk.num_tokens
    computed = f"prompt [{chunk.start}, {end})" if chunk.start < prompt_len else "decode"
    return f"{computed} → token {end - prompt_len + 1}" if chunk.num_samples else computed


def _request(name: str, num_prompt_tokens: int) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=token_array([sum(name.encode())] * num_prompt_tokens),
        params=SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_OUTPUT_TOKENS),
    )
