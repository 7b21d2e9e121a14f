"""The loop with a simulated executor whose steps sometimes fail."""

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import StepPlan, StepResult
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.engine.core import EngineCore
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler


class FailingExecutor(SimulatedExecutor):
    """Raises in every step that holds the request named "poison"."""

    def collect(self) -> StepResult:
        plan: StepPlan = self._submitted[0][0]
        result = super().collect()
        if any(chunk.request_id == "poison" for chunk in plan.chunks):
            raise RuntimeError("boom")
        return result


def engine() -> EngineCore:
    kv = KVCacheManager(num_blocks=100, block_size=4)
    config = SchedulerConfig(max_num_batched_tokens=8).resolve(max_model_len=64)
    scheduler = Scheduler(config, max_model_len=64, kv=kv)
    return EngineCore(scheduler, kv, FailingExecutor(VirtualClock(), lambda _: 0.01))


def request(request_id: str, prompt_len: int) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=(1,) * prompt_len,
        params=SamplingParams(max_tokens=5),
    )


def drain(core: EngineCore) -> list[RequestOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    core = engine()
    # The first fills the step's budget, so that the second waits for the step after the failure.
    outputs = core.step([request("poison", 8), request("innocent", 8)])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("poison", FinishReason.ERROR)]
    assert outputs[0].error == "RuntimeError: boom"
    outputs = drain(core)
    assert {o.request_id for o in outputs} == {"innocent"}
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert core.stats.kv_usage == 0.0


def test_stats_follow_the_work() -> None:
    core = engine()
    core.step([request("a", 20), request("b", 3)])
    assert (core.stats.num_running, core.stats.num_waiting) == (1, 1)
    assert 0.0 < core.stats.kv_usage < 1.0
    drain(core)
    assert (core.stats.num_running, core.stats.num_waiting) == (0, 0)
