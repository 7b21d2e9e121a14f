"""The body of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.api.bodies.body_model import Prompt, only
from legato.api.bodies.generation_options import GenerationRequest, NumLogprobs
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import MAX_N


def as_prompts(value: Any) -> list[Prompt]:
    """Return a list of prompts, from any of the four forms of `prompt`."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and all(isinstance(v, str) or _is_token_ids(v) for v in value):
        if not value:
            raise ValueError("there is no prompt in it")
        return value
    raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
    "minItems": 1,
}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _PROMPTS, _TOKEN_IDS]}


def _unless_false(value: Any) -> Any:
    """Read `false` as none, as in chat."""
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """Prompts to complete, however they were sent."""

    prompt: Annotated[
        list[Prompt],
        Field(fail_fast=True),
        BeforeValidator(as_prompts),
        WithJsonSchema(PROMPT_SCHEMA),
    ]
    """Text, token ids, or a list of either."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to texts."""
    echo: bool = False
    """Repeat the prompt before the completion."""
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(_unless_false)] = None
    """Log probabilities of this many tokens beside the sampled one."""
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Must be 1 or equal `n`."""
    suffix: Annotated[str, only("")] | None = None
    """Filling in the middle is not supported."""

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequestError("best_of must be 1 or equal n", param="best_of")
        if self.kv_transfer_params is not None and len(self.prompt) > 1:
            raise InvalidRequestError(
                "kv_transfer_params are of one prompt", param="kv_transfer_params"
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1, or 0 with echo: true", param="max_tokens"
            )
        if self.echo and self.logprob_token_ids:
            raise InvalidRequestError(
                "logprob_token_ids is not available with echo", param="logprob_token_ids"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs is not available with stream: true", param="echo"
            )
        return self

    @property
    def is_echo_only(self) -> bool:
        """Whether the answer has only the prompt, perhaps with scores."""
        return self.max_tokens == 0
