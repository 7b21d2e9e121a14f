"""The bodies of POST /tokenize and /detokenize, and their answers."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from legato.api.bodies.body_model import AtMost, JobMaker, ModelRequest, only
from legato.api.bodies.chat_messages import Messages, TemplateOptions
from legato.api.bodies.chat_tools import functions_of
from legato.api.job import End, Part, answered
from legato.api.limits import MAX_DETOKENIZED
from legato.api.openai.chat_body import ChatRequest
from legato.core.errors import InvalidRequestError
from legato.engine.client.requests import check_token_ids


class TokenizeRequest(TemplateOptions, ModelRequest):
    """A prompt or messages, as in vLLM, or content, as in llama-server."""

    prompt: str | None = None
    """Text; either this or `messages`."""
    messages: Messages | None = None
    """Conversation for the chat template."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to `prompt`, the default."""
    return_token_strs: bool = False
    """Return the vocabulary's spelling of each token, too."""
    content: str | None = None
    """Text; the answer is then llama-server's, with `tokens` alone."""
    add_special: bool = False
    """Add the tokenizer's special tokens to `content`."""
    parse_special: Annotated[bool, only(True)] = True
    """Special tokens in texts are tokens."""
    with_pieces: bool = False
    """With `content`, each token is an `id` and a `piece`, its text or bytes."""

    @model_validator(mode="after")
    def _check_together(self) -> "TokenizeRequest":
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise InvalidRequestError("give either prompt, messages or content", param="prompt")
        if self.content is None and (self.add_special or self.with_pieces):
            name = "add_special" if self.add_special else "with_pieces"
            raise InvalidRequestError(f"{name} goes with content only", param=name)
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequestError(
                "special tokens of messages come from the template", param="add_special_tokens"
            )
        return self


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class LlamaToken(msgspec.Struct, frozen=True):
    """Attributes: `piece`: the token's text, or its bytes if they are no whole characters."""

    id: int
    piece: str | list[int]


class LlamaTokens(msgspec.Struct, frozen=True):
    tokens: list[int | LlamaToken]


class TemplatedPrompt(msgspec.Struct, frozen=True):
    """Attributes: `prompt` is the conversation as the chat template writes it."""

    prompt: str


class DetokenizeRequest(ModelRequest):
    tokens: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), AtMost(MAX_DETOKENIZED)
    ]
    """Token ids."""


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text, by vLLM's name and by llama-server's."""

    prompt: str
    content: str


class Tokenization(JobMaker):
    """Answers requests about tokens."""

    def tokenize(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(TokenizeRequest, body)
        if request.content is not None:
            yield from answered(self._llama_tokens(request.content, request))
            return
        token_ids = self._token_ids(request)
        spelling = self._tokenizer.backend.id_to_token
        wants_spelling = request.return_token_strs
        yield from answered(
            TokenizeAnswer(
                count=len(token_ids),
                max_model_len=self._info.max_model_len,
                tokens=token_ids,
                token_strs=[spelling(i) or "" for i in token_ids] if wants_spelling else None,
            )
        )

    def detokenize(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(DetokenizeRequest, body)
        check_token_ids(request.tokens, self._info.vocab_size, "tokens")
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=False)
        yield from answered(DetokenizeAnswer(text, text))

    def apply_template(self, body: bytes) -> Iterator[Part | End]:
        """Yield the prompt of a chat; the body may have all fields of one."""
        request = self._parser.parse(ChatRequest, body)
        text = self._prompts.written(
            [message.for_template() for message in request.messages],
            request.conversation_options,
            request.tool_use.shown,
            effort=request.effort,
        )
        yield from answered(TemplatedPrompt(text))

    def info(self, _body: bytes) -> Iterator[Part | End]:
        yield from answered(self._tokenizer.info)

    def _llama_tokens(self, content: str, request: TokenizeRequest) -> LlamaTokens:
        self._parser.check_fits(len(content), "content")
        token_ids = self._tokenizer.encode(content, request.add_special)
        if not request.with_pieces:
            return LlamaTokens(list(token_ids))
        pieces = map(self._tokenizer.vocabulary.token_bytes, token_ids)
        return LlamaTokens(list(map(LlamaToken, token_ids, map(_text_or_bytes, pieces))))

    def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            return self._prompts.make(
                [message.for_template() for message in request.messages],
                request.conversation_options,
                functions_of(request.tools or ()),
                effort=request.effort,
            ).token_ids
        assert request.prompt is not None, "checked by TokenizeRequest"
        self._parser.check_fits(len(request.prompt), "prompt")
        return self._tokenizer.encode(request.prompt, request.add_special_tokens is not False)


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
