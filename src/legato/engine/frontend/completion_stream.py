"""From the engine's outputs for one request to the text of one completion."""

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.engine.frontend.completion import CompletionDelta
from legato.engine.frontend.detokenizer import Detokenizer
from legato.engine.frontend.stop_strings import StopStrings
from legato.model.tokenizer import Tokenizer


class CompletionStream:
    """Detokenizes one request's tokens and ends it at a stop string.

    Args:
        index: which of the prompt's completions this is.
    """

    def __init__(self, index: int, request: AddRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self._index = index
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop = StopStrings(params.stop, include_in_output=self._include_stop)
        self._num_tokens = 0
        self._finished_by_engine = False

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string ended the completion while the engine would go on."""
        return self._stop.matched is not None and not self._finished_by_engine

    def push(self, output: RequestOutput, received_s: float = 0.0) -> CompletionDelta:
        """What the output adds to the completion; its tokens after a stop string are left out."""
        self._finished_by_engine = output.finish_reason is not None
        text, num_taken = "", 0
        for token_id in output.new_token_ids:
            num_taken += 1
            is_last = num_taken == len(output.new_token_ids)
            if is_last and output.finish_reason is FinishReason.STOP and not self._include_stop:
                break  # the token that ended it
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
