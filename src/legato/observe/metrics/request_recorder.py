"""Measures requests as their tokens arrive. All times are seconds of `time.monotonic`."""

from collections.abc import Sequence

from prometheus_client import Histogram

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.tenant import DEFAULT_TENANT
from legato.observe.metrics.server_metrics import ServerMetrics
from legato.observe.metrics.slo_metrics import RequestSlo


class JobRecorder:
    """Measures one HTTP request. Each of its prompts counts as a request, for any `n`.

    Args:
        prompt_lens: tokens of each prompt.
        n: choices of each prompt; choice i of prompt p has the index p * n + i.
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
        self._running = [
            _RequestRecorder(metrics, num_tokens, n, slo_class, arrival_s, tenant)
            for num_tokens in prompt_lens
        ]
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
        """Record an output of a choice, which may be its last.

        Args:
            num_tokens, finish_reason: as the client sees them; a stop string may have ended the
                choice within the output.
        """
        prompt, choice = divmod(index, self._n)
        request = self._running[prompt]
        if num_tokens or output.pooled is not None:
            request.add_tokens(choice, output, num_tokens, received_s)
        if finish_reason is not None:
            request.end(choice, finish_reason, received_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """Record that all running requests were refused, for one of `REFUSALS`."""
        self._metrics.refused[reason].inc(sum(request.is_running for request in self._running))
        self.end(FinishReason.REFUSED, now_s)

    def end(self, reason: FinishReason, now_s: float) -> None:
        """End all running requests. Calling it again has no effect."""
        for request in self._running:
            request.end_all(reason, now_s)


class _RequestRecorder:
    """Measures one prompt and its choices; a request ends as the last choice does."""

    def __init__(
        self,
        metrics: ServerMetrics,
        num_prompt_tokens: int,
        num_choices: int,
        slo_class: str,
        arrival_s: float,
        tenant: str,
    ) -> None:
        self._metrics = metrics.requests
        self._tenants = metrics.tenants
        self._tenant = tenant
        self._class = slo_class
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = arrival_s
        self._scheduled_s = arrival_s
        self._first_s: float | None = None  # when its first token came
        self._lengths: list[int] = []  # of the choices that have ended
        self._running = {
            choice: _ChoiceRecorder(metrics, slo_class, arrival_s) for choice in range(num_choices)
        }

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def add_tokens(
        self, choice: int, output: RequestOutput, num_tokens: int, received_s: float
    ) -> None:
        recorder = self._running[choice]
        if (
            choice == 0 and not recorder.has_begun
        ):  # as for `usage`: the others find its blocks in the cache
            self._note_prompt(output)
        if self._first_s is None:
            self._note_first(output, received_s)
        recorder.add_tokens(output, num_tokens, received_s)

    def end(self, choice: int, reason: FinishReason, now_s: float) -> None:
        recorder = self._running.pop(choice)
        recorder.end(reason, now_s)
        self._metrics.choices[reason].inc()
        self._lengths.append(recorder.num_tokens)
        if self._running:
            return
        metrics = self._metrics
        metrics.ended[reason].inc()
        if self._first_s is not None:
            metrics.e2e_s.of(self._class).observe(now_s - self._arrival_s)
            metrics.inference_s.observe(now_s - self._scheduled_s)
            metrics.decode_s.observe(now_s - self._first_s)
            metrics.request_generation_tokens.observe(sum(self._lengths))
        if any(self._lengths):
            metrics.longest_generation.observe(max(self._lengths))

    def end_all(self, reason: FinishReason, now_s: float) -> None:
        for choice in tuple(self._running):
            self.end(choice, reason, now_s)

    def _note_prompt(self, output: RequestOutput) -> None:
        metrics, num_cached = self._metrics, output.num_cached_tokens
        metrics.prompt_tokens.inc(self._num_prompt_tokens)
        metrics.cached_tokens.inc(num_cached)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_computed_tokens.observe(self._num_prompt_tokens - num_cached)

    def _note_first(self, output: RequestOutput, received_s: float) -> None:
        """Record the first token of any choice."""
        assert output.scheduled_s is not None
        metrics = self._metrics
        self._scheduled_s, self._first_s = output.scheduled_s, received_s
        ttft_s = received_s - self._arrival_s
        metrics.ttft_s.of(self._class).observe(ttft_s)
        self._tenants.first_token(self._tenant, ttft_s)
        metrics.queue_s.of(self._class).observe(self._scheduled_s - self._arrival_s)
        metrics.prefill_s.observe(received_s - self._scheduled_s)


class _ChoiceRecorder:
    """Measures the stream of one choice. Attributes: `num_tokens`: tokens received."""

    def __init__(self, metrics: ServerMetrics, slo_class: str, arrival_s: float) -> None:
        self._metrics = metrics.requests
        self._slo = RequestSlo(metrics.slos, slo_class)
        self._class = slo_class
        self._itl_s: Histogram | None = None  # of its class, which may be unknown
        self._arrival_s = arrival_s
        self._first_s = self._last_s = arrival_s
        self.num_tokens = 0

    @property
    def has_begun(self) -> bool:
        return self._itl_s is not None

    def add_tokens(self, output: RequestOutput, num_tokens: int, received_s: float) -> None:
        gap_s = received_s - self._last_s
        if self._itl_s is not None:
            self._itl_s.observe(gap_s)
            self._slo.token(gap_s)
        else:
            self._itl_s = self._metrics.itl_s.of(self._class)
            self._first_s = received_s
            if output.is_promise_waived:
                self._slo.waive()
            self._slo.first_token(received_s - self._arrival_s)
        self._last_s = received_s
        self.num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def end(self, reason: FinishReason, now_s: float) -> None:
        """Record the end of the stream; called once."""
        if self.num_tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self.num_tokens - 1)
            self._metrics.tpot_s.of(self._class).observe(tpot_s)
            self._slo.pace(tpot_s)
        elif not self.has_begun and reason is not FinishReason.REFUSED:
            self._slo.no_first_token(now_s - self._arrival_s)
        self._slo.end(reason)
