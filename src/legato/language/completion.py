"""Turns the engine's outputs for one request into a completion's text and tokens."""

import copy
from functools import cached_property

import msgspec

from legato.core.outputs import FinishReason, RequestOutput, TokenLogprobs, TokenScores, entries_of
from legato.core.request import AddRequest
from legato.core.vocabulary import Vocabulary
from legato.language.message.message import Message, read_message
from legato.language.message.message_syntax import MessageSyntax
from legato.language.output_text import Detokenizer, StopStrings


class CompletionDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New text and tokens of one completion of a prompt.

    Attributes:
        output: the engine's output. The other attributes have less of it if a stop string ended the
            completion within it.
        index: which of the prompt's `n` completions, from 0.
        text: whole characters only; may be empty while a character or a possible stop string is
            incomplete. The texts of all deltas concatenated are the completion.
        token_ids: sampled since the last delta.
        logprobs: one entry a token, or None if not asked for.
        finish_reason: set on the completion's last delta.
        stop_reason: the stop string or stop token id that ended it, if one did.
        received_s: when the front end received the output, on the clock of its times.
    """

    output: RequestOutput
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    received_s: float


class CompletionStream:
    """Detokenizes one request's tokens and ends it at a stop string.

    Args:
        index: which of the prompt's completions this is.
    """

    def __init__(self, index: int, request: AddRequest, vocabulary: Vocabulary) -> None:
        params = request.params
        self._index = index
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._end_token_ids = frozenset((*request.eos_token_ids, *params.stop_token_ids))
        self._detokenizer = Detokenizer(
            vocabulary,
            skip_special_tokens=params.skip_special_tokens,
            kept=params.kept_special_tokens,
        )
        self._stop = StopStrings(params.stop, include_in_output=self._include_stop)
        self._num_tokens = 0
        self._finished_by_engine = False

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string ended the completion before the engine did."""
        return self._stop.matched is not None and not self._finished_by_engine

    def push(self, output: RequestOutput, received_s: float = 0.0) -> CompletionDelta:
        """Return the delta of an output, without tokens after a stop string."""
        self._finished_by_engine = output.finish_reason is not None
        text, num_taken = "", 0
        for token_id in output.new_token_ids:
            num_taken += 1
            is_last = num_taken == len(output.new_token_ids)
            ends = is_last and output.finish_reason is FinishReason.STOP
            if ends and token_id in self._end_token_ids and not self._include_stop:
                break  # the end token; if the grammar ended the text, its last token is kept
            text += self._take(token_id)
            if self._stop.matched is not None:
                break
        if self._finished_by_engine:
            text += self._stop.flush()
        stopped = self._stop.matched is not None
        return CompletionDelta(
            output=output,
            index=self._index,
            text=text,
            token_ids=output.new_token_ids[:num_taken],
            logprobs=None if output.logprobs is None else output.logprobs[:num_taken],
            finish_reason=FinishReason.STOP if stopped else output.finish_reason,
            stop_reason=self._stop.matched if stopped else output.stop_reason,
            received_s=received_s,
        )

    def _take(self, token_id: int) -> str:
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        return self._stop.push(text) if self._num_tokens > self._min_tokens else text


class Completion:
    """One completion, built from its deltas.

    Attributes:
        index (int): which of the prompt's `n` completions this is, from 0.
        text (str): the completion without the prompt.
        token_ids (list[int]): the tokens that were sampled.
        logprobs (list[TokenLogprobs] | None): one entry a token; None if not asked for.
        prompt_logprobs (list[TokenLogprobs] | None): one entry for each prompt token from the
            second on; None if not asked for, and only on index 0.
        prompt_scores (list[TokenScores] | None): `prompt_logprobs` in the parts that came.
        finish_reason (FinishReason | None): why it ended; None while it runs.
        stop_reason (int | str | None): the stop string or stop token id that ended it, if one did.
        num_cached_tokens (int): prompt tokens that were found in the cache.
        num_thinking_tokens (int): tokens of its thoughts, if it answers a conversation and the
            marks of the model's thoughts are tokens.
        is_thinking_cut (bool): whether a thought was ended at its budget.
        cumulative_logprob (float | None): sum of `logprobs`.
        message (Message | None): the text parsed as an assistant's message; None while it runs.

    Args:
        syntax: for parsing the text as a message; None if all of it is content.
    """

    def __init__(self, index: int, syntax: MessageSyntax | None = None) -> None:
        self.index = index
        self._syntax = syntax
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_scores: list[TokenScores] | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []  # of the parts already read
        self._num_parts_read = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = self.num_thinking_tokens = 0
        self.is_thinking_cut = False

    def add(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs = _extended(self.logprobs, delta.logprobs)
        if delta.output.prompt_logprobs is not None:
            self.prompt_scores = [*(self.prompt_scores or ()), delta.output.prompt_logprobs]
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.output.num_cached_tokens)
        self.num_thinking_tokens = max(self.num_thinking_tokens, delta.output.num_thinking_tokens)
        self.is_thinking_cut |= delta.output.is_thinking_cut

    def snapshot(self) -> "Completion":
        """Return a copy that does not change when this one grows."""
        taken = copy.copy(self)
        taken.token_ids = self.token_ids.copy()
        taken.logprobs = copy.copy(self.logprobs)
        taken._prompt_logprobs = self._prompt_logprobs.copy()
        return taken

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """One entry for each prompt token from the second on; None if not asked for."""
        if self.prompt_scores is None:
            return None
        self._prompt_logprobs += entries_of(self.prompt_scores[self._num_parts_read :])
        self._num_parts_read = len(self.prompt_scores)
        return self._prompt_logprobs

    @cached_property
    def message(self) -> Message | None:
        """The text parsed as an assistant's message; None while it runs."""
        if self.finish_reason is None:
            return None
        return read_message(self.text, self.finish_reason, self._syntax, self.stop_reason)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' log probabilities; None if not asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


def _extended(
    entries: list[TokenLogprobs] | None, new: tuple[TokenLogprobs, ...] | None
) -> list[TokenLogprobs] | None:
    """Append `new` to `entries` in place; return None while neither exists."""
    if new is None:
        return entries
    if entries is None:
        return list(new)
    entries += new
    return entries
