"""What comes of a body that another process reads: any number of parts, then an end."""

import msgspec

from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import TokenIds
from legato.engine.frontend.kv_tickets import KVTransferParams
from legato.server.http.errors import ErrorDetail
from legato.text.message_syntax import MessageSyntax


class PromptTokens(msgspec.Struct, frozen=True, tag=True):
    """A part: the next prompt."""

    token_ids: TokenIds


class Piece(msgspec.Struct, frozen=True, tag=True):
    """A part: the next bytes of a whole answer."""

    data: bytes


class InputItem(msgspec.Struct, frozen=True, tag=True):
    """A part: the next item of a response's input, in JSON, without an id.

    Attributes:
        prefix: of the id that it gets.
    """

    prefix: str
    data: bytes


class ResponseTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part: what a response is to know of its request.

    Attributes:
        shown: what it repeats; key the field, value JSON.
    """

    shown: dict[str, bytes]
    previous_response_id: str | None
    is_stored: bool
    shows_logprobs: bool


class Generation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An end: a request for completions of the prompts before it.

    Attributes:
        include_usage, continuous_usage_stats: as in `StreamOptions`.
        output_limit_name: what the client calls `max_tokens`.
        echoed: texts that go before the completions of each prompt; None where none do.
        is_echo_only: whether the prompts alone are wanted back, scored perhaps.
        shows_prompt_logprobs: whether they were asked for by that name, which `params` cannot tell.
        returns_token_ids: whether answers tell the tokens of prompts and completions.
        calls_functions: whether tools were given, and are to be called, by OpenAI's older name.
        kv_transfer_params: what is asked about the prompt's blocks and other engines.
        message_syntax: how the completions are to be read as messages; None where all is content.
    """

    params: SamplingParams
    service: ServiceParams
    is_streamed: bool
    include_usage: bool
    continuous_usage_stats: bool
    output_limit_name: str = "max_tokens"
    echoed: tuple[str, ...] | None = None
    is_echo_only: bool = False
    shows_prompt_logprobs: bool = False
    returns_token_ids: bool = False
    calls_functions: bool = False
    kv_transfer_params: KVTransferParams | None = None
    message_syntax: MessageSyntax | None = None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """An end: the pieces before it are the answer, in JSON."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An end: why there is no other."""

    status: int
    detail: ErrorDetail


class NeedsStored(msgspec.Struct, frozen=True, tag=True):
    """An end: the body is to be read again, beside the stored responses that it names.

    Attributes:
        item_ids: of items that it refers to.
    """

    previous_response_id: str | None
    item_ids: list[str]


Part = PromptTokens | Piece | InputItem | ResponseTerms
End = Generation | Answered | Refused | NeedsStored
