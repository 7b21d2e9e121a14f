"""Estimates the largest possible size of an answer before its first token.

The estimate takes numbers and tokens to have their usual size in JSON; but a token may be a hundred
spaces. An answer is made while it is written, so one that becomes larger blocks no other request
and takes no more memory.
"""

from collections.abc import Sequence

import msgspec

from legato.api.limits import MAX_WHOLE_ANSWER_BYTES
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams

_TEXT_BYTES, _ID_BYTES = 8, 7
_CHAT_SCORE_BYTES, _PROMPT_SCORE_BYTES, _COLUMN_SCORE_BYTES = 110, 90, 35
"""JSON of one token's log probability in chat, `prompt_logprobs` and completions."""
_COLUMN_BYTES = 40
"""JSON of one position in the lists of completions, without its most likely tokens."""


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an answer that decide its size.

    Attributes:
        is_chat: a chat shows its prompt once; completions show it beside each choice.
        returns_token_ids: of the prompt, too.
        shows_prompt_logprobs: whether the request has `prompt_logprobs`.
        echoes: the prompt precedes each text.
    """

    is_chat: bool
    returns_token_ids: bool
    shows_prompt_logprobs: bool
    echoes: bool = False

    def num_bytes(
        self, params: SamplingParams, prompt_lens: Sequence[int], max_model_len: int
    ) -> tuple[int, int]:
        """Return the bytes of all prompts shown, and of all outputs."""
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
        num_shown = params.num_shown_logprobs
        if self.is_chat and num_shown is not None:
            return num_bytes + _CHAT_SCORE_BYTES * (1 + num_shown)
        return num_bytes + self._column_bytes(params)

    def _column_bytes(self, params: SamplingParams) -> int:
        if params.num_shown_logprobs is None:
            return 0
        return _COLUMN_BYTES + _COLUMN_SCORE_BYTES * (1 + params.num_shown_logprobs)


def check_answer_size(
    form: AnswerForm, params: SamplingParams, prompt_lens: Sequence[int], max_model_len: int
) -> None:
    """Raises `InvalidRequestError` if the answer may exceed `MAX_WHOLE_ANSWER_BYTES`."""
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
