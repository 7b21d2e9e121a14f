"""Makes the engine's prompts from those of the Python API, with a tokenizer or without."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, TypeVar, cast

import msgspec
import numpy as np

from legato.checkpoint.defaults import ModelDefaults, load_defaults
from legato.checkpoint.source import ModelSource
from legato.core.config import ModelConfig
from legato.core.errors import InvalidRequestError
from legato.core.pooling import UNSAMPLED, Pooling, PromptPooling
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.vocabulary import Vocabulary
from legato.engine.client.requests import last_tokens, with_bad_words
from legato.engine.process.engine_messages import EngineInfo
from legato.language.conversation.rewrite import arguments_object, content_text, why_not_read
from legato.language.conversation.template import (
    DEFAULT_OPTIONS,
    ChatTemplates,
    ConversationOptions,
)
from legato.language.conversation.thought_end import thinking_limit, without_thought
from legato.language.embedding import Side, kept_tokens
from legato.language.forms.check import GrammarChecker
from legato.language.message.message_syntax import MessageSyntax

if TYPE_CHECKING:  # its import takes two thirds of a second
    from legato.language.tokenizer.tokenizer import Tokenizer

_NO_VOCABULARY = Vocabulary.of((), frozenset())
_OF_THE_RENDERER = frozenset({"messages", "chat_template", "tokenize"})
"""Names that a template's variables must not have."""


class TokensPrompt(TypedDict):
    """A tokenized prompt.

    Attributes:
        prompt_token_ids: ids in the model's vocabulary.
        cache_salt: optional; cached blocks are shared only among prompts with the same salt.
    """

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


class TextPrompt(TypedDict):
    """A prompt as text.

    Attributes:
        prompt: the text; without a `cache_salt`, the string alone means the same.
        cache_salt: as in `TokensPrompt`.
    """

    prompt: str
    cache_salt: NotRequired[str]


_Settings = TypeVar("_Settings", SamplingParams, ServiceParams)
Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]  # keys "role", "content" and others that the template reads


class ReadPrompt(NamedTuple):
    """A prompt ready for the engine.

    Attributes:
        text: of the prompt; None if it was given as tokens.
        params: with the tokens of their bad words.
        syntax: of the completion, as in `Completion`.
        pooling: how it becomes a vector; None if it is completed.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    service: ServiceParams
    syntax: MessageSyntax | None = None
    pooling: PromptPooling | None = None


class Text(NamedTuple):
    """The text side of a model.

    Attributes:
        tokenizer: None if none was loaded; then prompts are token ids, and outputs have no text.
    """

    tokenizer: "Tokenizer | None"
    vocabulary: Vocabulary
    defaults: ModelDefaults


def text_of(config: ModelConfig, source: ModelSource, *, skip_tokenizer_init: bool) -> Text:
    """Load a checkpoint's tokenizer and defaults. Dummy weights need no tokenizer.

    Raises:
        ConfigError: there is no such tokenizer, or no such file of a template.
        UnsupportedModelError: the tokenizer or a file of settings cannot be used.
    """
    has_own = source.has_tokenizer or config.load_format != "dummy"
    if skip_tokenizer_init or not (has_own or config.tokenizer):
        return Text(None, _NO_VOCABULARY, load_defaults(source, None))
    from legato.language.tokenizer.loading import load_text, text_source

    tokenizer, defaults = load_text(text_source(config, source))
    return Text(tokenizer, tokenizer.vocabulary, defaults)


class PromptReader:
    """Reads prompts and conversations for one engine."""

    def __init__(self, tokenizer: "Tokenizer | None", info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._forms = GrammarChecker(lambda: self.tokenizer.vocabulary)

    @property
    def tokenizer(self) -> "Tokenizer":
        """Raises `InvalidRequestError` if none was loaded."""
        if self._tokenizer is None:
            raise _no_tokenizer("there is none to work with text")
        return self._tokenizer

    @cached_property
    def _templates(self) -> ChatTemplates:
        return ChatTemplates(self.tokenizer)

    def read(
        self, prompt: Prompt, params: SamplingParams, service: ServiceParams | None = None
    ) -> ReadPrompt:
        """Read a prompt; raises `InvalidRequestError` if it can never be served so."""
        params = _typed(self._settled(params))
        text, whole = self._tokenized(prompt)
        token_ids = last_tokens(whole, params, self._info.max_model_len)
        service = service or ServiceParams()
        salt = None if isinstance(prompt, str) else prompt.get("cache_salt")
        if salt is not None:
            service = msgspec.structs.replace(service, cache_salt=salt)
        return ReadPrompt(text, list(token_ids), params, _typed(service))

    def read_pooled(
        self, prompt: Prompt, pooling: Pooling, truncate_prompt_tokens: int | None, side: Side
    ) -> ReadPrompt:
        """Read a prompt that becomes a vector.

        Args:
            truncate_prompt_tokens, side: as of `LLM.embed`.

        Raises:
            InvalidRequestError: as `read`.
        """
        read = self.read(prompt, UNSAMPLED)
        count, whole = truncate_prompt_tokens, read.token_ids
        is_text = read.text is not None and count is not None
        bare = self.tokenizer.encode(read.text or "", False) if is_text else whole
        kept = kept_tokens(whole, bare, count, side, self._info.max_model_len)
        return read._replace(token_ids=list(kept), pooling=pooling)

    def conversation(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        service: ServiceParams | None = None,
        *,
        options: ConversationOptions = DEFAULT_OPTIONS,
    ) -> ReadPrompt:
        """Render a conversation to a prompt, with its answer's syntax.

        Args:
            messages: as of `LLM.chat`.

        Raises:
            InvalidRequestError: as `read`, or the template refuses the messages.
        """
        for name in _OF_THE_RENDERER.intersection(options.chat_template_kwargs or {}):
            raise InvalidRequestError(
                f"chat_template_kwargs must not contain {name}", param="chat_template_kwargs"
            )
        budget = self._thinking_budget(options)
        keeps_parts = options.chat_template_content_format == "openai"
        functions = [dict(tool) for tool in options.tools or ()]
        template = self._templates.get(options.chat_template, has_tools=bool(functions))
        text, stand_ins = template.render(
            [_for_template(message, keeps_parts=keeps_parts) for message in messages],
            functions,
            options=options.variables,
            special_tokens=options.message_special_tokens,
        )
        token_ids = self.tokenizer.encode_rendered(text, stand_ins)
        syntax = template.reply_syntax(text, functions)
        syntax = syntax if functions else syntax.without_calls()
        if template.may_think(text) and params.structured_outputs is None:
            limit = thinking_limit(self.tokenizer, syntax, template.thought_end, budget)
            if limit is not None:
                token_ids, syntax, limit = without_thought(token_ids, syntax, limit)
                params = msgspec.structs.replace(params, thinking_limit=limit)
            elif budget is not None:
                raise InvalidRequestError(
                    "this model's marks of thinking are no tokens, so no budget can be held",
                    param="thinking_token_budget",
                )
        read = self.read(TokensPrompt(prompt_token_ids=token_ids), params, service)
        if syntax.is_plain or params.structured_outputs is not None:  # a form covers the whole text
            return read
        kept = (*read.params.kept_special_tokens, *self.tokenizer.special_marks(syntax).values())
        shown = msgspec.structs.replace(read.params, kept_special_tokens=kept)
        return read._replace(params=shown, syntax=syntax)

    def _thinking_budget(self, options: ConversationOptions) -> int | None:
        budget = options.thinking_token_budget
        if budget is not None and budget < -1:
            raise InvalidRequestError(
                f"thinking_token_budget must be at least -1, got {budget}",
                param="thinking_token_budget",
            )
        return None if budget in (None, -1) else min(budget, self._info.max_model_len)

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        match prompt:
            case {"prompt_token_ids": token_ids}:
                return None, list(cast("Sequence[int]", token_ids))
            case {"prompt": str(text)} | str(text):
                return text, self.tokenizer.encode(text)
        raise InvalidRequestError(f"a prompt is a text or token ids, got {prompt!r}")

    def _settled(self, params: SamplingParams) -> SamplingParams:
        if self._tokenizer is not None:
            tokenizer = self._tokenizer
            params = self._forms.resolved(params)
            return with_bad_words(params, lambda text: tokenizer.encode(text, False))
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise _no_tokenizer(f"{name} are texts; there are {_INSTEAD[name]}", name)
        if params.structured_outputs is not None:
            raise _no_tokenizer("a form is of text", "structured_outputs")
        return params


_INSTEAD = {"stop": "stop_token_ids", "bad_words": "bad_words_token_ids"}


def _no_tokenizer(reason: str, param: str = "prompt") -> InvalidRequestError:
    return InvalidRequestError(
        f"no tokenizer was loaded, by skip_tokenizer_init or for want of one: {reason}", param=param
    )


def _typed(settings: _Settings) -> _Settings:
    """Return settings as an engine's process reads them: numpy's numbers become Python's.

    Raises:
        InvalidRequestError: a value is not of its field's type; it would end that process.
    """
    try:
        sent = msgspec.msgpack.encode(settings, enc_hook=_number)
        return msgspec.msgpack.decode(sent, type=type(settings))
    except (TypeError, OverflowError, msgspec.ValidationError) as error:
        raise InvalidRequestError(f"a setting of the request has a wrong type: {error}") from error


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is neither a number nor a text")


def _for_template(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    """Return a message with arguments as objects, and its content as one text or in parts."""
    readable = dict(message)
    content = readable.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise InvalidRequestError(
                    f"a content part of type {kind!r} is not supported{why_not_read(kind)}",
                    param="messages",
                )
        if not keeps_parts:
            readable["content"] = content_text(content)
    if readable.get("tool_calls"):
        readable["tool_calls"] = list(map(_call_for_template, readable["tool_calls"]))
    return readable


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = arguments_object(function.get("arguments", {}))
    return {**call, "function": {**function, "arguments": arguments}}
