"""A request: the frozen message that asks for it and the one mutable record of its progress."""

import math
from collections.abc import Sequence

import msgspec

from legato.core.kv_transfer import BlocksArrived, FetchBlocks, KVTransfer
from legato.core.outputs import FinishReason
from legato.core.pooling import PromptPooling
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams, SloClass
from legato.core.token_ids import TokenIds


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A validated, tokenized request on its way to the engine.

    Attributes:
        request_id: unique among all requests the engine holds.
        prompt_token_ids: at least one token.
        params: with `seed` and `max_tokens` resolved to numbers; `n` is 1 (the front end fans out).
            A form of the output is a grammar for `compile_grammar`.
        eos_token_ids: the model's end-of-sequence tokens; empty if `ignore_eos` is set.
        arrival_time_s: when its first bytes arrived at the front end, on the machine's monotonic
            clock. Deadlines count from then.
        reading_s: time from then until it was sent to the engine, for reading, parsing and
            tokenizing.
        is_rerun: another engine had accepted it and died, so it must not be refused.
        kv_transfer: transfer of its prompt's blocks to or from another engine; None without one.
        pooling: how its prompt becomes a vector, with which it ends; None if it samples tokens.
        choice: its index among the choices of its prompt; figures of prompts count the first.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    service: ServiceParams = ServiceParams()
    eos_token_ids: tuple[int, ...] = ()
    arrival_time_s: float = 0.0
    reading_s: float = 0.0
    is_rerun: bool = False
    kv_transfer: KVTransfer | None = None
    pooling: PromptPooling | None = None
    choice: int = 0

    @property
    def sent_s(self) -> float:
        """When it was sent to the engine, on the clock of `arrival_time_s`."""
        return self.arrival_time_s + self.reading_s


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop a request, waiting or running; unknown or ended requests are ignored."""

    request_id: str


Event = AddRequest | AbortRequest | BlocksArrived


class Request:
    """A request's progress: a row of tokens, whose first `num_computed_tokens` are cached.

    There is no phase flag. A request with one token left to compute is decoding, one with more is
    prefilling, and a preempted one simply has nothing computed.

    Steps may be in flight while the next one is planned:

        [0, num_computed_tokens)                     computed
        [num_computed_tokens, num_scheduled_tokens)  in a step in flight
        [num_scheduled_tokens, num_expected_tokens)  to be scheduled; tokens from num_tokens on are
                                                     yet to be sampled, by a step in flight

    Args:
        max_model_len: number of tokens at which it ends, even if it asks for more.

    Attributes:
        slo: its promise.
        is_best_effort, promise_s: as the SLO says; `promise_s` is infinite if it bounds no step.
        is_pooled: whether it ends with its prompt, without a token.
        num_tokens, num_prompt_tokens: tokens with and without the output, stored because they are
            read so often.
        num_final_tokens: number of tokens at which it ends, if nothing ends it earlier.
        in_flight_since_s, in_flight_until_s: expected end of the step in flight that samples its
            first token, and of the last one that samples any.
        num_reserved_tokens: tokens that its blocks have room for; set by the KV manager.
        num_given_tokens: its last tokens that were given, not sampled, until they are computed.
        num_passed_over: its oldest chunks in flight whose results do not count, since tokens were
            given in the place of theirs. It joins no step before they have landed.
        rank: its place among requests that wait for prefill; lower goes first.
        num_hit_tokens: its tokens that were in the cache at the scheduler's last lookup, computed
            or about to be by another request; until it runs, blocks may come and go.
        found: its path in the cache at the KV manager's last lookup, from which the next goes on.
        num_cached_tokens: prompt tokens that it did not compute because another request had; tokens
            that it finds again after a preemption do not count.
        is_late: whether its TTFT SLO was found to be out of reach while it waited.
        is_promise_waived: whether its promise was given up, as `allow_best_effort` allows.
        scheduled_s: planning time of the step that admitted it; None before.
        stalled_since_s: since when no useful chunk has fitted into a step.
        foreseen_s: when a forecast admitted it, and the TTFT from then on in the forecast; None
            without a forecast, or if it was too short to measure its error.
        first_token_s, last_token_s: when its first and its last token came; None before the first.
        token_due_s: when its next token is due; infinite without a promise, or before its first
            token.
    """

    __slots__ = (
        "finish_reason",
        "first_token_s",
        "foreseen_s",
        "found",
        "in_flight_since_s",
        "in_flight_until_s",
        "is_best_effort",
        "is_late",
        "is_pooled",
        "is_promise_waived",
        "last_token_s",
        "message",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_tokens",
        "num_final_tokens",
        "num_given_tokens",
        "num_hit_tokens",
        "num_passed_over",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reserved_tokens",
        "num_scheduled_tokens",
        "num_tokens",
        "params",
        "promise_s",
        "rank",
        "request_id",
        "scheduled_s",
        "slo",
        "stalled_since_s",
        "stop_reason",
        "token_due_s",
        "token_ids",
    )

    def __init__(self, message: AddRequest, slo: SloClass, max_model_len: int) -> None:
        self.message = message
        self.params = message.params
        self.request_id = message.request_id
        self.num_prompt_tokens = self.num_tokens = len(message.prompt_token_ids)
        assert message.params.max_tokens is not None, "the front end resolves it"
        most = min(self.num_prompt_tokens + message.params.max_tokens, max_model_len)
        self.is_pooled = message.pooling is not None
        self.num_final_tokens = (
            self.num_prompt_tokens if self.is_pooled else max(self.num_prompt_tokens + 1, most)
        )
        self.num_expected_tokens = self.num_tokens
        self.in_flight_since_s = self.in_flight_until_s = 0.0
        self._promise(slo)
        self.rank: tuple[int, float] = (0, 0.0)
        self.is_late = False
        self.is_promise_waived = False
        self.scheduled_s: float | None = None
        self.stalled_since_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.token_due_s = math.inf
        self.token_ids: TokenIds = message.prompt_token_ids[:]
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.num_reserved_tokens = 0
        self.num_given_tokens = self.num_passed_over = 0
        self.num_hit_tokens = 0
        self.found: object = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.foreseen_s: tuple[float, float] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def is_to_be_fetched(self) -> bool:
        """Whether its admission asks another engine for its blocks."""
        return isinstance(self.message.kv_transfer, FetchBlocks) and self.scheduled_s is None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight computes some of its tokens."""
        return self.num_scheduled_tokens > self.num_computed_tokens

    @property
    def is_being_sampled(self) -> bool:
        """Whether a step in flight samples a token for it."""
        return self.num_expected_tokens > self.num_tokens

    @property
    def num_expected_output_tokens(self) -> int:
        """Its output tokens when all steps in flight have landed, if none of them ends it."""
        return self.num_expected_tokens - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that are still to be scheduled; 1 for a stream."""
        return self.num_expected_tokens - self.num_scheduled_tokens

    @property
    def is_stream(self) -> bool:
        """Whether its whole prompt has been scheduled, and only its next token has not.

        Tokens given after that one are computed with it.
        """
        start, end = self.num_scheduled_tokens, self.num_expected_tokens
        return self.num_prompt_tokens <= start < end <= start + 1 + self.num_given_tokens

    @property
    def ends_in_flight(self) -> bool:
        """Whether it ends when a step in flight lands, by its length or by an abort."""
        if self.is_pooled:
            return self.num_scheduled_tokens >= self.num_final_tokens
        return self.num_expected_tokens >= self.num_final_tokens

    @property
    def waits_for_token(self) -> bool:
        """Whether its next chunk needs the value of a token that is yet to be sampled."""
        return self.is_being_sampled and self.params.needs_values

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that, as far as is known, it must compute itself."""
        return self.num_tokens - max(self.num_computed_tokens, self.num_hit_tokens)

    @property
    def ttft_deadline_s(self) -> float | None:
        """When its first token is due, on the clock of `arrival_time_s`."""
        return None if self.slo.ttft_s is None else self.message.arrival_time_s + self.slo.ttft_s

    def catch_up(self, num_computed_tokens: int) -> None:
        """Skip to `num_computed_tokens`, as far as its shared blocks are computed."""
        skipped = num_computed_tokens - self.num_computed_tokens
        if skipped <= 0:
            return
        self.num_computed_tokens = self.num_scheduled_tokens = num_computed_tokens
        if not self.num_preemptions:
            self.num_cached_tokens += skipped

    def preempt(self) -> None:
        """Drop all computed tokens."""
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.num_preemptions += 1

    def give_up_promise(self) -> None:
        """Become best-effort."""
        self._promise(SloClass())
        self.is_promise_waived = True
        self.token_due_s = math.inf

    def change_promise(self, slo: SloClass, now_s: float) -> None:
        """Take another promise; a stream's next token is due as if its last had come now."""
        self._promise(slo)
        self.is_late = False
        if self.first_token_s is not None:
            self.token_due_s = self._next_due_s(self.first_token_s, now_s, self.num_tokens)

    def _promise(self, slo: SloClass) -> None:
        self.slo = slo
        self.is_best_effort = slo.is_best_effort
        self.promise_s = math.inf if slo.promise_s is None else slo.promise_s

    def settle(self) -> None:
        """Expect nothing more from steps in flight."""
        self.num_passed_over = 0
        self.num_scheduled_tokens = self.num_computed_tokens
        self.num_expected_tokens = self.num_tokens

    def abort_in_flight(self) -> None:
        """End when its first step in flight lands, and join no further step."""
        self.finish_reason = FinishReason.ABORT
        self.num_final_tokens = 0

    def append(self, token_id: int, now_s: float) -> None:
        """Append a sampled token, and end the request if it is the last."""
        self.token_ids.append(token_id)
        self.num_tokens += 1
        if self.num_expected_tokens < self.num_tokens:
            self.num_expected_tokens = self.num_tokens
        self._stamp(now_s)
        self._end_after(token_id)

    def _end_after(self, token_id: int) -> None:
        """End the request if its last token, which this is, does."""
        if self.num_tokens - self.num_prompt_tokens >= self.params.min_tokens:
            if token_id in self.message.eos_token_ids:
                self.finish_reason = FinishReason.STOP
                return
            if token_id in self.params.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = token_id
                return
        if self.num_tokens >= self.num_final_tokens:
            self.finish_reason = FinishReason.LENGTH

    def give(self, token_ids: Sequence[int], num_in_flight: int) -> int:
        """Append tokens that are not sampled, up to one that ends the request.

        Args:
            num_in_flight: chunks in flight that were planned for other tokens.

        Returns:
            how many were appended.
        """
        num_before = self.num_tokens
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self.num_tokens += 1
            self._end_after(token_id)
            if self.finish_reason is not None:
                break
        num_given = self.num_tokens - num_before
        self.num_given_tokens += num_given
        if num_in_flight:
            self.num_passed_over = num_in_flight
            self.num_expected_tokens = max(self.num_expected_tokens, self.num_tokens)
        else:
            self.settle()
        return num_given

    def pass_over(self) -> None:
        """Take note that a chunk whose result does not count landed, or will not be computed."""
        self.num_passed_over -= 1
        if not self.num_passed_over:
            self.settle()

    @property
    def is_pooled_whole(self) -> bool:
        """Whether all tokens of its prompt are pooled."""
        return self.is_pooled and self.num_computed_tokens >= self.num_prompt_tokens

    def complete(self) -> None:
        """End because no token can follow, even if the length ends it at the same time."""
        self.finish_reason = FinishReason.STOP

    @property
    def first_expected_s(self) -> float:
        """When its first token came, or comes with a step in flight; only for streams."""
        return self.in_flight_since_s if self.first_token_s is None else self.first_token_s

    @property
    def last_expected_s(self) -> float | None:
        """When its last token comes, tokens in flight included; None before the first."""
        return self.in_flight_until_s if self.is_being_sampled else self.last_token_s

    @property
    def next_due_s(self) -> float:
        """When the token after those in flight is due; `token_due_s` if none is in flight."""
        if self.num_expected_tokens == self.num_tokens:
            return self.token_due_s
        first_s, until_s = self.first_expected_s, self.in_flight_until_s
        return self._next_due_s(first_s, until_s, self.num_expected_tokens)

    def _stamp(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.token_due_s = self._next_due_s(self.first_token_s, now_s, self.num_tokens)

    def _next_due_s(self, first_s: float, last_s: float, num_tokens: int) -> float:
        slo = self.slo
        due_s = math.inf if slo.itl_s is None else last_s + slo.itl_s
        if slo.tpot_s is None:
            return due_s
        # A stream behind its pace is not asked to catch up in one step.
        on_pace_s = first_s + (num_tokens - self.num_prompt_tokens) * slo.tpot_s
        return min(due_s, max(on_pace_s, last_s + slo.tpot_s))
