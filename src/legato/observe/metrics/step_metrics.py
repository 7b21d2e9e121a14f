"""Metrics of steps: each is seen, however seldom somebody scrapes."""

from typing import Protocol, get_args

from legato.core.step_record import EndedBy
from legato.observe.metrics import buckets
from legato.observe.metrics.registry import MetricRegistry


class Step(Protocol):
    """One step in numbers; see `legato.engine.process.messages.StepStats`."""

    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_decode_tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def predicted_s(self) -> float | None: ...
    @property
    def prefill_ended_by(self) -> tuple[EndedBy, ...]: ...


class StepMetrics:
    """Histograms of steps, and the chunk that prompts get now."""

    def __init__(self, registry: MetricRegistry) -> None:
        histogram = registry.histogram
        self._tokens = histogram(
            "iteration_tokens_total", "Tokens of a step.", buckets.STEP_TOKENS
        ).of()
        self._prefill_tokens = histogram(
            "iteration_prefill_tokens", "Prompt tokens of a step.", buckets.STEP_TOKENS
        ).of()
        self._decode_tokens = histogram(
            "iteration_decode_tokens", "Running streams' tokens of a step.", buckets.STEP_TOKENS
        ).of()
        self._seconds = histogram(
            "step_time_seconds", "From planning a step to its result.", buckets.STEP_S
        ).of()
        self._ratio = histogram(
            "step_time_ratio",
            "A step's duration over what the step-time model predicted; 1 is as predicted.",
            buckets.STEP_TIME_RATIO,
        ).of()
        chunks = registry.counter(
            "prefill_chunks", "Prefill chunks, by why they were no longer.", "ended_by"
        )
        self._chunks = {reason: chunks.of(reason) for reason in get_args(EndedBy)}
        self._chunk = registry.gauge(
            "prefill_chunk_tokens", "Prompt tokens of the latest step that had any."
        ).of()

    def observe(self, step: Step) -> None:
        """A step has run."""
        self._tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self._prefill_tokens.observe(step.num_prefill_tokens)
        self._decode_tokens.observe(step.num_decode_tokens)
        self._seconds.observe(step.seconds)
        if step.predicted_s:
            self._ratio.observe(step.seconds / step.predicted_s)
        if step.num_prefill_tokens:
            self._chunk.set(step.num_prefill_tokens)
        for ended_by in step.prefill_ended_by:
            self._chunks[ended_by].inc()
