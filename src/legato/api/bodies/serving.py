"""The kinds of bodies, and the model and settings for parsing them."""

from typing import Literal

import msgspec

from legato.api.config import UnknownFields
from legato.engine.process.engine_messages import EngineInfo
from legato.language.conversation.guard import MessageSpecialTokens

Kind = Literal[
    "chat",
    "completions",
    "embeddings",
    "score",
    "rerank",
    "responses",
    "input_tokens",
    "messages",
    "count_tokens",
    "generate",
    "tokenize",
    "detokenize",
    "tokenizer_info",
    "render_chat",
    "render_completions",
    "render_messages",
    "render_responses",
]
"""The endpoint that a body was sent to."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the settings that bodies are parsed with.

    Attributes:
        max_completions, trust_request_chat_template, message_special_tokens, unknown_fields: as in
            `ServerConfig`.
    """

    info: EngineInfo
    max_completions: int
    trust_request_chat_template: bool
    message_special_tokens: MessageSpecialTokens
    unknown_fields: UnknownFields
