"""How large an answer may become, known before anything of it is computed.

It is an estimate: what a number and a token's text take in JSON is that of tokens as they usually
are, and a token may be a hundred spaces. An answer is made while it is written, so that one which
becomes larger holds up no other request and takes no more memory.
"""

from collections.abc import Sequence

import msgspec

from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams
from legato.server.limits import MAX_WHOLE_ANSWER_BYTES

_TEXT_BYTES, _ID_BYTES = 8, 7
_CHAT_SCORE_BYTES, _PROMPT_SCORE_BYTES, _COLUMN_SCORE_BYTES = 110, 90, 35
"""Of one token's log probability, as chat, `prompt_logprobs` and plain completions show it."""
_COLUMN_BYTES = 40
"""Of a position in the lists of plain completions, beside its most likely tokens."""


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer shows.

    Attributes:
        is_chat: it shows its prompt once, and plain completions show it beside each completion.
        returns_token_ids: of the prompt, too.
        shows_prompt_logprobs: those that are asked for by that name.
        echoes: the prompt stands before each text.
    """

    is_chat: bool
    returns_token_ids: bool
    shows_prompt_logprobs: bool
    echoes: bool = False

    def num_bytes(
        self, params: SamplingParams, prompt_lens: Sequence[int], max_model_len: int
    ) -> tuple[int, int]:
        """Of all that is shown of prompts, and of all outputs."""
        shown = 1 if self.is_chat else params.n
        num_outputs = 0
        for prompt_len in prompt_lens:
            room = max(1, max_model_len - prompt_len)
            num_outputs += params.n * min(params.max_tokens or room, room)
        return (
            shown * sum(prompt_lens) * self._prompt_token_bytes(params),
            num_outputs * self._output_token_bytes(params),
        )

    def _prompt_token_bytes(self, params: SamplingParams) -> int:
        num_bytes = _ID_BYTES if self.returns_token_ids else 0
        if self.shows_prompt_logprobs:
            num_bytes += _PROMPT_SCORE_BYTES * (1 + (params.prompt_logprobs or 0))
        if self.echoes:
            num_bytes += _TEXT_BYTES + self._column_bytes(params)
        return num_bytes

    def _output_token_bytes(self, params: SamplingParams) -> int:
        num_bytes = _TEXT_BYTES + (_ID_BYTES if self.returns_token_ids else 0)
        if self.is_chat and params.logprobs is not None:
            return num_bytes + _CHAT_SCORE_BYTES * (1 + params.logprobs)
        return num_bytes + self._column_bytes(params)

    def _column_bytes(self, params: SamplingParams) -> int:
        if params.logprobs is None:
            return 0
        return _COLUMN_BYTES + _COLUMN_SCORE_BYTES * (1 + params.logprobs)


def check_answer_size(
    form: AnswerForm, params: SamplingParams, prompt_lens: Sequence[int], max_model_len: int
) -> None:
    """Raises `InvalidRequestError` where the answer may exceed `MAX_WHOLE_ANSWER_BYTES`."""
    of_prompts, of_outputs = form.num_bytes(params, prompt_lens, max_model_len)
    num_bytes = of_prompts + of_outputs
    if num_bytes <= MAX_WHOLE_ANSWER_BYTES:
        return
    blamed = "max_tokens"
    if of_prompts > of_outputs:
        blamed = "prompt_logprobs" if form.shows_prompt_logprobs else "prompt"
    raise InvalidRequestError(
        f"the answer could have {num_bytes >> 20} MiB, over {MAX_WHOLE_ANSWER_BYTES >> 20}: "
        f"{of_prompts >> 20} MiB of what it shows of prompts and {of_outputs >> 20} MiB of its "
        "outputs; ask for fewer completions, tokens or log probabilities, or in several requests",
        param="n" if params.n > 1 else blamed,
    )
