"""What a reader process makes of a body: any number of parts, then an end."""

from typing import Literal

import msgspec

from legato.api.anthropic.context_edits import AppliedEdit
from legato.api.http.errors import ErrorDetail
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import TokenIds
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.message.message_syntax import MessageSyntax

OutputMode = Literal["tokens", "text", "derender"]
"""What an answer has beside tokens: nothing, their text, or the message that the text is."""


class PromptTokens(msgspec.Struct, frozen=True, tag=True):
    """A part: the next prompt.

    Attributes:
        offsets: where each token begins and ends in the prompt's text, in characters, one after
            the other; None if not asked for, or if the prompt was given in tokens.
    """

    token_ids: TokenIds
    offsets: TokenIds | None = None


class Piece(msgspec.Struct, frozen=True, tag=True):
    """A part: the next bytes of a whole answer."""

    data: bytes


class Warned(msgspec.Struct, frozen=True, tag=True):
    """A part: what of the request has no effect.

    Attributes:
        param: the field, with whose name the text begins; None if there are several.
    """

    text: str
    param: str | None = None


class InputItem(msgspec.Struct, frozen=True, tag=True):
    """A part: the next item of a response's input, without an id.

    Attributes:
        prefix: of the id that the server adds.
        data: the item in JSON, but for its opening brace: the id comes first.
    """

    prefix: str
    data: bytes


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the Responses API that the model knows as a function of another name or form.

    Attributes:
        is_custom: its input is a text, which the function takes as its only argument.
    """

    name: str
    namespace: str | None
    is_custom: bool


class ResponseTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part: what a response needs from its request.

    Attributes:
        shown: the fields that the response repeats; key the field, value JSON.
        renamed_tools: key the model's name of a tool.
    """

    shown: dict[str, bytes]
    previous_response_id: str | None
    is_stored: bool
    is_background: bool
    shows_logprobs: bool
    renamed_tools: dict[str, CalledTool] = {}


class MessageTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part: what an answer of Anthropic's API needs from its request.

    Attributes:
        edits: what the context edits have cleared; None if the request has none.
        omits_thinking: whether the text of thinking is in the signature only.
    """

    edits: list[AppliedEdit] | None
    omits_thinking: bool


class GenerateTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part: what an answer in tokens needs from its request.

    Attributes:
        request_id: as the client calls the request; None if it does not.
        output_mode: as in `OutputMode`.
    """

    request_id: str | None
    output_mode: OutputMode


class RenderTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part: what rendered prompts need from their request.

    Attributes:
        request_id: as of `GenerateTerms`.
        stream_options, parse_context: as of `GenerateRequest`, in JSON; None if there are none.
    """

    request_id: str | None
    stream_options: bytes | None
    parse_context: bytes | None


class Generation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An end: a request for completions of the preceding prompts.

    Attributes:
        include_usage, continuous_usage_stats: as in `StreamOptions`.
        output_limit_name: the client's name of `max_tokens`.
        echoed: the text before the completions of each prompt; None if there is none.
        echo_starts: where each token of an echoed prompt begins in its text, in characters, for log
            probabilities; empty for a prompt that was given in tokens.
        is_echo_only: whether the answer has only the prompts, perhaps with scores.
        num_prompt_logprobs: the request's `prompt_logprobs`; `params` may have more for an echo's
            log probabilities.
        returns_token_ids: whether answers have the token ids of prompts and completions.
        names_tokens_by_id: whether log probabilities name tokens by their ids, not their texts.
        calls_functions: whether the request uses OpenAI's older `functions`.
        kv_transfer_params: the parameters of a transfer of the prompt's blocks between engines.
        message_syntax: for reading the completions as messages; None if all text is content.
    """

    params: SamplingParams
    service: ServiceParams
    is_streamed: bool
    include_usage: bool
    continuous_usage_stats: bool
    output_limit_name: str = "max_tokens"
    echoed: tuple[str, ...] | None = None
    echo_starts: tuple[TokenIds, ...] = ()
    is_echo_only: bool = False
    num_prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    calls_functions: bool = False
    kv_transfer_params: KVTransferParams | None = None
    message_syntax: MessageSyntax | None = None


class EmbeddingTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An end: a request for the vectors of the preceding prompts.

    Attributes:
        encoding_format, dimensions: as in `EmbeddingRequest`.
        normalizes: whether each vector's L2 norm is made 1.
    """

    service: ServiceParams
    encoding_format: Literal["float", "base64"]
    dimensions: int | None
    normalizes: bool


class ScoreTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An end: a request for the scores of the preceding prompts.

    Attributes:
        field_name: the client's name of the prompts.
        is_activated: whether a score is the sigmoid of the head's output.
        top_n: most documents to return by their scores, 0 for all; None for scores alone.
        documents: texts that are returned; None without them.
    """

    service: ServiceParams
    field_name: str
    is_activated: bool
    top_n: int | None = None
    documents: list[str] | None = None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """An end: the preceding pieces are the answer, in JSON."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An end: the reason for refusing the request."""

    status: int
    detail: ErrorDetail


class NeedsStored(msgspec.Struct, frozen=True, tag=True):
    """An end: the server must send the body again with the stored responses that it names.

    Attributes:
        item_ids: of stored items that the body refers to.
    """

    previous_response_id: str | None
    item_ids: list[str]


Part = (
    PromptTokens
    | Piece
    | InputItem
    | ResponseTerms
    | MessageTerms
    | GenerateTerms
    | RenderTerms
    | Warned
)
End = Generation | EmbeddingTerms | ScoreTerms | Answered | Refused | NeedsStored
