"""Records of real schedules on the simulated executor."""

from collections.abc import Sequence

from legato.core.config import SchedulerConfig, Speculative
from legato.core.outputs import FinishReason
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import AnswerRecord, EngineRecord
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.speculation.lookup import OwnTokens

STEP_S, TOKEN_S, BETWEEN_S = 0.01, 0.001, 0.002


def recorded_run(
    arrivals: Sequence[tuple[float, int, int]] = ((0.0, 20, 3), (0.005, 90, 2), (0.05, 5, 4)),
    *,
    budget: int = 32,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    depth: int = 1,
    is_random: bool = False,
    speculative: Speculative = "off",
    vocab_size: int = 8,
) -> list[EngineRecord]:
    """Requests "0", "1", ... of (arrival in s, prompt tokens, output tokens), until all have ended.

    A step of n tokens takes `STEP_S + n * TOKEN_S`, and `BETWEEN_S` passes before each is planned.

    Args:
        depth: steps in flight.
        is_random: whether an output may end before its length does.
        speculative: as in `SchedulerConfig`; drafts are of a request's own tokens.
        vocab_size: of outputs: drafts are right as often as it is small.
    """
    config = SchedulerConfig(
        prefill_order="fcfs",
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        admission_optimism=1.0,  # so that there are preemptions
        speculative=speculative,
    )
    kv = KVCacheManager(num_blocks, 4)
    clock = VirtualClock()
    core = EngineLoop(
        Scheduler(config.resolve(256), max_model_len=256, kv=kv, drafters=(OwnTokens(),)),
        kv,
        SimulatedExecutor(
            clock,
            lambda plan: STEP_S + TOKEN_S * plan.num_tokens,
            vocab_size=vocab_size,
            depth=depth,
        ),
        clock,
    )
    core.set_recording(is_on=True)
    eos_token_ids = (0,) if is_random else ()
    coming = [_request(i, *arrival, eos_token_ids) for i, arrival in enumerate(arrivals)]
    while coming or core.has_work:
        if not core.has_work:
            clock.advance_to(coming[0].arrival_time_s)
        clock.advance_to(clock.now_s + BETWEEN_S)
        arrived = [request for request in coming if request.arrival_time_s <= clock.now_s]
        del coming[: len(arrived)]
        core.step(arrived)
    return core.take_records()


def answer_record(
    request_id: str,
    *,
    received_s: float = 0.0,
    ended_s: float = 1.0,
    sent_s: Sequence[float] = (),
) -> AnswerRecord:
    """A streamed answer of one completion, with the tokens that were sent at these times."""
    return AnswerRecord(
        http_id="abc",
        answer_id="def",
        operation="chat",
        is_streamed=True,
        request_ids={0: request_id},
        received_s=received_s,
        ended_s=ended_s,
        sent_s={0: list(sent_s)} if sent_s else {},
        finish_reasons={0: FinishReason.LENGTH},
        error=None,
        error_type=None,
        num_prompt_tokens=1,
        num_output_tokens=1,
        n=1,
        max_tokens=None,
        temperature=0.0,
        top_p=1.0,
        trace_context={},
    )


def _request(
    index: int, arrival_s: float, num_prompt: int, num_output: int, eos_token_ids: tuple[int, ...]
) -> AddRequest:
    return AddRequest(
        request_id=str(index),
        prompt_token_ids=token_array(range(1000 * index, 1000 * index + num_prompt)),
        params=SamplingParams(max_tokens=num_output, seed=0, temperature=0.0),
        arrival_time_s=arrival_s,
        eos_token_ids=eos_token_ids,
    )
