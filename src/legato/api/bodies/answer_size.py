"""Estimates the largest possible size of an answer before its first token.

The estimate takes numbers and tokens to have their usual size in JSON; but a token may be a hundred
spaces. An answer is made while it is written, so one that becomes larger blocks no other request
and takes no more memory.
"""

from legato.api.job import Job
from legato.api.limits import MAX_WHOLE_ANSWER_BYTES
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams

_TEXT_BYTES, _ID_BYTES = 8, 7
_CHAT_SCORE_BYTES, _PROMPT_SCORE_BYTES, _COLUMN_SCORE_BYTES = 110, 90, 35
"""JSON of one token's log probability in chat, `prompt_logprobs` and completions."""
_COLUMN_BYTES = 40
"""JSON of one position in the lists of completions, without its most likely tokens."""


def check_answer_size(job: Job, max_model_len: int) -> None:
    """Refuse a job whose answer may exceed `MAX_WHOLE_ANSWER_BYTES`.

    A chat shows its prompt once; completions show it beside each choice.

    Raises:
        InvalidRequestError: it may; `param` is what to ask less of.
    """
    params, options = job.params, job.answer
    is_chat = job.operation != "text_completion"
    num_prompt_logprobs = params.prompt_logprobs if is_chat else options.num_prompt_logprobs
    shows_prompt_logprobs = num_prompt_logprobs is not None
    returns_token_ids = options.returns_token_ids or job.operation == "generate"
    num_shown = 1 if is_chat else params.n
    of_prompts = (
        num_shown
        * job.num_prompt_tokens
        * prompt_token_bytes(
            params,
            returns_token_ids=returns_token_ids,
            shows_prompt_logprobs=shows_prompt_logprobs,
            echoes=options.echoed is not None,
        )
    )
    rooms = [max(1, max_model_len - len(prompt.token_ids)) for prompt in job.prompts]
    num_outputs = params.n * sum(min(params.max_tokens or room, room) for room in rooms)
    of_outputs = num_outputs * output_token_bytes(
        params, is_chat=is_chat, returns_token_ids=returns_token_ids
    )
    num_bytes = of_prompts + of_outputs
    if num_bytes <= MAX_WHOLE_ANSWER_BYTES:
        return
    blamed = "max_tokens"
    if of_prompts > of_outputs:
        blamed = "prompt_logprobs" if shows_prompt_logprobs else "prompt"
    raise InvalidRequestError(
        f"the answer could have {num_bytes >> 20} MiB, over {MAX_WHOLE_ANSWER_BYTES >> 20}: "
        f"{of_prompts >> 20} MiB of what it shows of prompts and {of_outputs >> 20} MiB of its "
        "outputs; ask for fewer completions, tokens or log probabilities, or in several requests",
        param="n" if params.n > 1 else blamed,
    )


def prompt_token_bytes(
    params: SamplingParams,
    *,
    returns_token_ids: bool = False,
    shows_prompt_logprobs: bool = False,
    echoes: bool = False,
) -> int:
    """Return the bytes of what an answer shows of one token of a prompt."""
    num_bytes = _ID_BYTES if returns_token_ids else 0
    if shows_prompt_logprobs:
        num_bytes += _PROMPT_SCORE_BYTES * (1 + (params.prompt_logprobs or 0))
    if echoes:
        num_bytes += _TEXT_BYTES + _column_bytes(params)
    return num_bytes


def output_token_bytes(
    params: SamplingParams, *, is_chat: bool, returns_token_ids: bool = False
) -> int:
    """Return the bytes of one token of an output."""
    num_bytes = _TEXT_BYTES + (_ID_BYTES if returns_token_ids else 0)
    num_shown = params.num_shown_logprobs
    if is_chat and num_shown is not None:
        return num_bytes + _CHAT_SCORE_BYTES * (1 + num_shown)
    return num_bytes + _column_bytes(params)


def _column_bytes(params: SamplingParams) -> int:
    if params.num_shown_logprobs is None:
        return 0
    return _COLUMN_BYTES + _COLUMN_SCORE_BYTES * (1 + params.num_shown_logprobs)
