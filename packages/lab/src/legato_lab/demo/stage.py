"""Serves the demo's traffic with one policy after another, on the real model."""

import math
import time
from collections import Counter

import torch
from msgspec.structs import replace

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import EngineRecord, StepRecord
from legato.core.token_ids import token_array
from legato.engine.build.builder import load_runtime
from legato.engine.errors import RequestFailedError
from legato.engine.loop.engine_loop import EngineLoop
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel
from legato_lab.demo.traffic import Traffic
from legato_lab.simulation.record import ProbeResult
from legato_lab.simulation.workload import RandomPrompts

_LONG = "long prompt"
_LONG_OUTPUT = 8
_FIXED_BUDGET = 512


def demo_policies(itl_slo_s: float) -> dict[str, SchedulerConfig]:
    """Return the policies to compare; key the name."""
    fixed = SchedulerConfig(max_num_batched_tokens=_FIXED_BUDGET)
    return {
        "whole prompts": SchedulerConfig(enable_chunked_prefill=False),
        f"prefill first, {_FIXED_BUDGET} tokens": replace(fixed, policy="prefill-first"),
        f"stall-free, {_FIXED_BUDGET} tokens": fixed,
        f"stall-free, {1e3 * itl_slo_s:.0f} ms": SchedulerConfig(itl_slo_s=itl_slo_s),
    }


class DemoRun:
    """One policy's run, in progress or finished. Times are seconds of `time.monotonic`.

    Attributes:
        token_times_s: for each stream, when its tokens came.
        long_sent_s, long_first_s: when the long prompt was sent, and when its first token came.
        ended_s: None while it runs.
        progress: for each step with a part of the long prompt, when it ended and how many of the
            prompt's tokens were computed by then.
        steps: so far.
    """

    def __init__(self, name: str, traffic: Traffic) -> None:
        self.name = name
        self.traffic = traffic
        self.started_s = time.monotonic()
        self.token_times_s: list[list[float]] = [[] for _ in range(traffic.num_streams)]
        self.long_sent_s: float | None = None
        self.long_first_s: float | None = None
        self.ended_s: float | None = None
        self.progress: list[tuple[float, int]] = []
        self.steps: list[StepRecord] = []

    @property
    def is_over(self) -> bool:
        """Whether the streams have been watched for long enough after the long prompt."""
        first_s = self.long_first_s
        return first_s is not None and time.monotonic() - first_s >= self.traffic.tail_s

    @property
    def is_steady(self) -> bool:
        """Whether the streams have run for long enough to send the long prompt."""
        elapsed_s = time.monotonic() - self.started_s
        return all(self.token_times_s) and elapsed_s >= self.traffic.steady_s

    @property
    def stream_ids(self) -> list[str]:
        """Request ids by stream; unique among all runs, which share one executor."""
        return [f"{self.name}: {index}" for index in range(self.traffic.num_streams)]

    @property
    def long_id(self) -> str:
        return f"{self.name}: {_LONG}"

    def take(self, outputs: list[RequestOutput], records: list[EngineRecord]) -> None:
        """Take the outputs and records of a step.

        Raises:
            RequestFailedError: a request ended by an error.
        """
        now_s = time.monotonic()
        streams = {request_id: index for index, request_id in enumerate(self.stream_ids)}
        for output in outputs:
            if output.error is not None:
                raise RequestFailedError(output.error)
            num_tokens = len(output.new_token_ids)
            if output.request_id in streams:
                self.token_times_s[streams[output.request_id]] += [now_s] * num_tokens
            elif num_tokens and self.long_first_s is None:
                self.long_first_s = now_s
        for record in records:
            if isinstance(record, StepRecord):
                self._note(record)

    def result(self) -> ProbeResult:
        """Return the run's result, once the long prompt has its first token."""
        assert self.long_sent_s is not None
        assert self.long_first_s is not None
        sent_s = self.long_sent_s
        counts = [Counter(times) for times in self.token_times_s]  # one step's tokens come together
        return ProbeResult(
            token_times_s=[[at_s - sent_s for at_s in times] for times in counts],
            token_counts=[list(times.values()) for times in counts],
            window_start_s=-self.traffic.steady_s,
            long_ttfts_s=[self.long_first_s - sent_s],
        )

    def _note(self, step: StepRecord) -> None:
        self.steps.append(step)
        for chunk in step.chunks:
            if chunk.request_id == self.long_id:
                end = min(chunk.start + chunk.num_tokens, self.traffic.long_prompt)
                self.progress.append((step.ended_s, end))


class Stage:
    """A model that schedulers use in turn.

    Attributes:
        step_time: the belief of all schedulers about steps; each of them updates it.

    Raises:
        ConfigError, UnsupportedModelError: as `build_engine`.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Any promise makes the engine calibrate, or load a calibration. One step at a time, so that
        # none is in flight when the next scheduler takes over.
        scheduler = SchedulerConfig(itl_slo_s=1.0, num_steps_in_flight=1)
        promising = replace(config, scheduler=scheduler)
        self._runtime = load_runtime(promising)
        self.step_time = StepTimeModel(
            self._runtime.step_times.known().steps,
            self._runtime.rows,
            drops_rows=self._runtime.executor.drops_rows,
        )
        vocab_size = self._runtime.spec.vocab_size
        self._prompts = RandomPrompts(vocab_size=vocab_size, seed=0)

    @property
    def max_model_len(self) -> int:
        return self._runtime.max_model_len

    @property
    def longest_request(self) -> int:
        """Most tokens of a request whose prompt fits into one step; on a GPU, memory limits it."""
        runtime = self._runtime
        most = runtime.config.scheduler.most_batched_tokens(
            runtime.max_model_len, runtime.model.device.type
        )
        return min(runtime.max_model_len, most)

    @property
    def name(self) -> str:
        """The model, and what it runs on."""
        runtime = self._runtime
        dtype = str(runtime.model.dtype).removeprefix("torch.")
        where = f"{runtime.kernels} kernels on {torch.get_num_threads()} threads"
        if runtime.model.device.type != "cpu":
            where = str(runtime.model.device)
        return f"{runtime.config.model.model}, {dtype}, {where}"

    def warm_up(self) -> None:
        """Serve streams alone, since the machine may have been busier during calibration."""
        run = DemoRun("warm-up", Traffic(long_prompt=0, itl_slo_s=math.inf))
        engine, events = self._engine(SchedulerConfig()), self._streams(run)
        while not run.is_steady:
            run.take(engine.step(events), engine.take_records())
            events = []
        self._end(engine, run)

    def serve(self, run: DemoRun, config: SchedulerConfig) -> None:
        """Serve the traffic; `run` gets the results as they come."""
        engine = self._engine(config)
        events = self._streams(run)
        while not run.is_over:
            run.take(engine.step(events), engine.take_records())
            events = []
            if run.long_sent_s is None and run.is_steady:
                events = [self._request(run.long_id, run.traffic.long_prompt, _LONG_OUTPUT)]
                run.long_sent_s = time.monotonic()
        self._end(engine, run)

    def _end(self, engine: EngineLoop, run: DemoRun) -> None:
        run.ended_s = time.monotonic()
        ids = [*run.stream_ids, run.long_id]
        engine.apply([AbortRequest(request_id=request_id) for request_id in ids])

    def _engine(self, config: SchedulerConfig) -> EngineLoop:
        """Make a new scheduler and an empty cache on the same executor."""
        runtime = self._runtime
        kv = KVCacheManager(
            runtime.kv.num_blocks,
            runtime.kv.block_size,
            enable_prefix_caching=runtime.config.cache.enable_prefix_caching,
        )
        scheduler = Scheduler(
            config.resolve(runtime.max_model_len, runtime.model.device.type),
            max_model_len=runtime.max_model_len,
            kv=kv,
            step_time=self.step_time,
        )
        engine = EngineLoop(scheduler, kv, runtime.executor)
        engine.set_recording(is_on=True)
        return engine

    def _streams(self, run: DemoRun) -> list[Event]:
        num_tokens = self.max_model_len - run.traffic.stream_prompt
        return [
            self._request(request_id, run.traffic.stream_prompt, num_tokens)
            for request_id in run.stream_ids
        ]

    def _request(self, request_id: str, num_prompt_tokens: int, num_tokens: int) -> AddRequest:
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=token_array(self._prompts.draw(num_prompt_tokens)),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens),
            arrival_time_s=time.monotonic(),
        )
