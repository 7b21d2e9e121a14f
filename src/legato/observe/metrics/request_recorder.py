"""Measures requests as their tokens arrive. All times are seconds of `time.monotonic`."""

from collections.abc import Sequence

from prometheus_client import Histogram

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.tenant import DEFAULT_TENANT
from legato.observe.metrics.server_metrics import ServerMetrics
from legato.observe.metrics.slo_metrics import RequestSlo


class JobRecorder:
    """Measures the completions of one HTTP request.

    Args:
        prompt_lens: tokens of each prompt.
        n: completions of each prompt; completion i of prompt p has the index p * n + i.
        max_tokens: as requested; None for pooled prompts, whose vector counts as a first token.
        slo_class: as requested; a request with an unknown class is never served.
        arrival_s: when the HTTP request came.
        tenant: of the request.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        prompt_lens: Sequence[int],
        n: int,
        max_tokens: int | None,
        slo_class: str,
        arrival_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self._metrics = metrics.requests
        self._n = n
        self._running = {
            index: _CompletionRecorder(
                metrics, prompt_lens[index // n], slo_class, arrival_s, tenant
            )
            for index in range(n * len(prompt_lens))
        }
        self._lengths: list[list[int]] = [[] for _ in prompt_lens]
        metrics.requests.params_n.observe(n)
        if max_tokens is not None:
            metrics.requests.params_max_tokens.observe(max_tokens)

    def take(
        self,
        index: int,
        output: RequestOutput,
        *,
        num_tokens: int,
        finish_reason: FinishReason | None,
        received_s: float,
    ) -> None:
        """Record an output of a completion, which may be its last.

        Args:
            num_tokens, finish_reason: as the client sees them; a stop string may have ended the
                completion within the output.
        """
        if num_tokens or output.pooled is not None:
            self._running[index].add_tokens(output, num_tokens, received_s)
        if finish_reason is not None:
            self._end(index, finish_reason, received_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """Record that all running completions were refused, for one of `REFUSALS`."""
        self._metrics.refused[reason].inc(len(self._running))
        self.end(FinishReason.REFUSED, now_s)

    def end(self, reason: FinishReason, now_s: float) -> None:
        """End all running completions. Calling it again has no effect."""
        for index in tuple(self._running):
            self._end(index, reason, now_s)

    def _end(self, index: int, reason: FinishReason, now_s: float) -> None:
        completion = self._running.pop(index)
        completion.end(reason, now_s)
        lengths = self._lengths[index // self._n]
        lengths.append(completion.num_tokens)
        if len(lengths) == self._n and any(lengths):
            self._metrics.longest_generation.observe(max(lengths))


class _CompletionRecorder:
    """Measures one completion. Attributes: `num_tokens`: tokens received."""

    def __init__(
        self,
        metrics: ServerMetrics,
        num_prompt_tokens: int,
        slo_class: str,
        arrival_s: float,
        tenant: str,
    ) -> None:
        self._metrics = metrics.requests
        self._tenants = metrics.tenants
        self._tenant = tenant
        self._slo = RequestSlo(metrics.slos, slo_class)
        self._class = slo_class
        self._itl_s: Histogram | None = None  # of its class, which may be unknown
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = arrival_s
        self._scheduled_s = arrival_s
        self._first_s = arrival_s
        self._last_s = arrival_s
        self.num_tokens = 0

    def add_tokens(self, output: RequestOutput, num_tokens: int, received_s: float) -> None:
        gap_s = received_s - self._last_s
        if self._itl_s is not None:
            self._itl_s.observe(gap_s)
            self._slo.token(gap_s)
        else:
            self._begin(output, received_s)
        self._last_s = received_s
        self.num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def end(self, reason: FinishReason, now_s: float) -> None:
        """Record the completion's end; called once."""
        self._metrics.ended[reason].inc()
        if self._itl_s is not None:
            self._note_times(now_s)
            self._metrics.request_generation_tokens.observe(self.num_tokens)
        elif reason is not FinishReason.REFUSED:
            self._slo.no_first_token(now_s - self._arrival_s)
        self._slo.end(reason)

    def _begin(self, output: RequestOutput, received_s: float) -> None:
        """Record the completion's first token."""
        assert output.scheduled_s is not None
        metrics = self._metrics
        self._itl_s = metrics.itl_s.of(self._class)
        self._scheduled_s, self._first_s = output.scheduled_s, received_s
        ttft_s = self._first_s - self._arrival_s
        metrics.ttft_s.of(self._class).observe(ttft_s)
        self._tenants.first_token(self._tenant, ttft_s)
        metrics.queue_s.of(self._class).observe(self._scheduled_s - self._arrival_s)
        metrics.prefill_s.observe(self._first_s - self._scheduled_s)
        metrics.prompt_tokens.inc(self._num_prompt_tokens)
        metrics.cached_tokens.inc(output.num_cached_tokens)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_computed_tokens.observe(self._num_prompt_tokens - output.num_cached_tokens)
        if output.is_promise_waived:
            self._slo.waive()
        self._slo.first_token(ttft_s)

    def _note_times(self, now_s: float) -> None:
        metrics = self._metrics
        metrics.e2e_s.of(self._class).observe(now_s - self._arrival_s)
        metrics.inference_s.observe(now_s - self._scheduled_s)
        metrics.decode_s.observe(now_s - self._first_s)
        if self.num_tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self.num_tokens - 1)
            metrics.tpot_s.of(self._class).observe(tpot_s)
            self._slo.pace(tpot_s)
