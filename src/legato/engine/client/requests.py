"""Makes the engine's requests of a tokenized prompt and its settings."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from legato.core.errors import InvalidRequestError
from legato.core.kv_transfer import FetchBlocks, KVTransfer
from legato.core.pooling import PromptPooling
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.engine.process.engine_messages import EngineInfo


def build_requests(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    service: ServiceParams,
    request_id: str,
    info: EngineInfo,
    eos_token_ids: tuple[int, ...],
    arrival_time_s: float,
    reading_s: float = 0.0,
    kv_transfer: KVTransfer | None = None,
    pooling: PromptPooling | None = None,
) -> list[AddRequest]:
    """Check a prompt against the model, and make one request for each of its `n` completions.

    This fills in open settings: `max_tokens` becomes the room in the context, and a missing seed a
    random one. The first completion keeps the given seed, so it equals the one with n = 1.

    Args:
        request_id: unique; the requests' ids are this id, a dash and the completion's index.
        eos_token_ids: the model's end-of-sequence tokens.
        arrival_time_s, reading_s: as of `AddRequest`.
        kv_transfer: how the prompt's blocks move. One completion sends them; all fetch them.
        pooling: how the prompt becomes a vector; None if it is completed.

    Raises:
        InvalidRequestError: the prompt is empty, too long, or names tokens that do not exist; the
            settings forbid all tokens, or have a form that is no grammar; or the server has no such
            class of service.
    """
    eos_token_ids = () if params.ignore_eos else eos_token_ids
    _check_head(pooling, info)
    _check_form(params)
    _check_tokens(prompt_token_ids, params, eos_token_ids, info)
    max_tokens = _max_tokens(len(prompt_token_ids), params.max_tokens, pooling, info)
    _check_class(service, info)
    token_ids = token_array(prompt_token_ids)
    seed = random.getrandbits(63) if params.seed is None else params.seed
    return [
        AddRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=token_ids,
            params=msgspec.structs.replace(
                params,
                n=1,
                bad_words=(),
                max_tokens=max_tokens,
                seed=_derived_seed(seed, index),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
            service=service,
            eos_token_ids=eos_token_ids,
            arrival_time_s=arrival_time_s,
            reading_s=reading_s,
            kv_transfer=_part(kv_transfer, index, params.n),
            pooling=pooling,
            choice=index,
        )
        for index in range(params.n)
    ]


def check_request(request: AddRequest, info: EngineInfo) -> None:
    """Check a request made elsewhere as `build_requests` checks its own.

    Raises:
        InvalidRequestError: `build_requests` would not make such a request.
    """
    prompt, params = request.prompt_token_ids, request.params
    _check_head(request.pooling, info)
    _check_form(params)
    _check_tokens(prompt, params, request.eos_token_ids, info)
    check_token_ids(request.eos_token_ids, info.vocab_size, "eos_token_ids")
    _max_tokens(len(prompt), params.max_tokens, request.pooling, info)
    _check_class(request.service, info)
    if params.n != 1 or params.max_tokens is None or params.seed is None:
        raise InvalidRequestError("a request to an engine leaves nothing open")
    if not (math.isfinite(request.arrival_time_s) and math.isfinite(request.reading_s)):
        raise InvalidRequestError("a request arrives at some time")


def last_tokens(
    token_ids: Sequence[int], params: SamplingParams, max_model_len: int
) -> Sequence[int]:
    """Truncate a prompt to its end, as `truncate_prompt_tokens` says.

    Raises:
        InvalidRequestError: it would leave more than the model's context.
    """
    kept = params.truncate_prompt_tokens
    if kept is None:
        return token_ids
    if kept == -1:
        kept = max(1, max_model_len - (params.max_tokens or 1))
    if kept > max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {kept}, which is more than the model's context of "
            f"{max_model_len} tokens",
            param="truncate_prompt_tokens",
        )
    return token_ids[-kept:]


def with_bad_words(
    params: SamplingParams, encode: Callable[[str], Sequence[int]]
) -> SamplingParams:
    """Return the settings with the tokens of their `bad_words`.

    Args:
        encode: returns the token ids of a text, without special tokens.
    """
    if not params.bad_words:
        return params
    texts = (text for word in params.bad_words for text in _spellings(word))
    words = dict.fromkeys(tuple(encode(text)) for text in texts)
    known = params.bad_words_token_ids
    return msgspec.structs.replace(
        params, bad_words_token_ids=(*known, *(word for word in words if word))
    )


def _spellings(word: str) -> tuple[str, str]:
    """Return a word as it is spelled at the beginning of a text and inside it."""
    bare = word.lstrip()
    return bare, f" {bare}"


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequestError`, which names `param`, if the model has no such token."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} has token id {token_id}, which is outside [0, {vocab_size})", param=param
            )


def _check_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Iterable[int],
    info: EngineInfo,
) -> None:
    if len(prompt_token_ids) <= info.max_model_len:  # a longer one is refused without reading it
        check_token_ids(prompt_token_ids, info.vocab_size, "prompt")
    check_token_ids(params.logit_bias or (), info.vocab_size, "logit_bias")
    check_token_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
    check_token_ids(params.allowed_token_ids or (), info.vocab_size, "allowed_token_ids")
    check_token_ids(params.logprob_token_ids or (), info.vocab_size, "logprob_token_ids")
    limit = params.thinking_limit
    if limit is not None and limit.budget is not None:
        given = (*limit.forced, *limit.forced_again)
        check_token_ids(given, info.vocab_size, "thinking_limit")
    words = params.bad_words_token_ids
    check_token_ids(itertools.chain(*words), info.vocab_size, "bad_words")
    _check_any_is_allowed(params, eos_token_ids)


def _check_head(pooling: PromptPooling | None, info: EngineInfo) -> None:
    if pooling is None and not info.generates:
        raise InvalidRequestError(
            "this model has no output projection: it returns vectors and scores, but no text",
            param="model",
        )
    if pooling == "score":
        check_scores(info)


def _check_form(params: SamplingParams) -> None:
    form = params.structured_outputs
    if form is not None and form.grammar is None:
        raise InvalidRequestError(
            f"an engine takes the form of an output as a grammar only, not as {form.form}",
            param="structured_outputs",
        )


def check_scores(info: EngineInfo) -> None:
    """Raises `InvalidRequestError` if the model has no head for scores."""
    if info.num_labels != 1:
        found = f"one with {info.num_labels} labels" if info.num_labels else "none"
        raise InvalidRequestError(
            "scores need a classification head with one label (score.weight of a "
            f"*ForSequenceClassification checkpoint), and this model has {found}",
            param="model",
        )


def _check_class(service: ServiceParams, info: EngineInfo) -> None:
    if service.slo_class not in info.slo_classes:
        raise InvalidRequestError(
            f"slo_class {service.slo_class!r} is not one of {', '.join(info.slo_classes)}",
            param="slo_class",
        )


def _check_any_is_allowed(params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
    """Check the first token only; for later ones, the sampler reports it."""
    if params.allowed_token_ids is None:
        return
    forbidden = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        forbidden.update(eos_token_ids, params.stop_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequestError(
            "bad_words and min_tokens forbid all of allowed_token_ids", param="allowed_token_ids"
        )


def _max_tokens(
    num_prompt_tokens: int, wanted: int | None, pooling: PromptPooling | None, info: EngineInfo
) -> int:
    if not num_prompt_tokens:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    max_model_len = info.max_model_len
    room = max_model_len - num_prompt_tokens
    if pooling is not None:
        if room < 0:
            raise InvalidRequestError(
                f"this model's maximum context length is {max_model_len} tokens, but the prompt "
                f"has {num_prompt_tokens}",
                param="prompt",
                code="context_length_exceeded",
            )
        return 1  # nothing is sampled
    max_tokens = max(1, room) if wanted is None else wanted
    if max_tokens > room:
        raise InvalidRequestError(
            f"this model's maximum context length is {max_model_len} tokens, but "
            f"{num_prompt_tokens + max_tokens} were requested: {num_prompt_tokens} in the prompt "
            f"and {max_tokens} to generate",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return max_tokens


def _derived_seed(seed: int, index: int) -> int:
    return seed if index == 0 else random.Random(f"{seed}/{index}").getrandbits(63)


def _part(transfer: KVTransfer | None, index: int, num_completions: int) -> KVTransfer | None:
    """Return one completion's part in the transfer of the prompt's blocks."""
    if isinstance(transfer, FetchBlocks):
        return msgspec.structs.replace(transfer, reader=index, num_readers=num_completions)
    return transfer if index == 0 else None
