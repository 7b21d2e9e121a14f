"""What a reader makes of a body: any number of parts, then an end, such as a job for the engine."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from legato.api.http.errors import ErrorDetail
from legato.api.limits import MAX_ANSWER_BYTES
from legato.core.errors import InvalidRequestError
from legato.core.pooling import PromptPooling
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.step_record import Operation
from legato.core.token_ids import TokenIds, token_array
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.message.message_syntax import MessageSyntax

_PIECE_BYTES = 2**18
_Terms = TypeVar("_Terms", bound=msgspec.Struct)


class JobPrompt(msgspec.Struct, frozen=True):
    """A prompt in tokens.

    Attributes:
        offsets: where each token begins and ends in the prompt's text, in characters, one after
            the other; None if not asked for, or if the prompt was given in tokens.
    """

    token_ids: TokenIds
    offsets: TokenIds | None = None

    @classmethod
    def of(
        cls, token_ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None = None
    ) -> "JobPrompt":
        """Args: offsets: of the whole prompt; `token_ids` may be only its end."""
        if offsets is None:
            return cls(token_array(token_ids))
        kept = offsets[len(offsets) - len(token_ids) :]
        return cls(token_array(token_ids), token_array(chain.from_iterable(kept)))


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only the answer to a job reads.

    Attributes:
        include_usage, continuous_usage_stats: as in `StreamOptions`.
        returns_token_ids: whether answers have the token ids of prompts and completions.
        names_tokens_by_id: whether log probabilities name tokens by their ids, not their texts.
        times_pieces: whether the answer and each piece of it have llama-server's timings.
        reports_progress: whether a stream reports each step's part of the prompt.
        calls_functions: whether the request uses OpenAI's older `functions`.
        echoed: the text before the completions of each prompt; None if there is none.
        echo_starts: where each token of an echoed prompt begins in its text, in characters, for log
            probabilities; empty for a prompt that was given in tokens.
        is_echo_only: whether the answer has only the prompts, perhaps with scores.
        num_prompt_logprobs: the request's `prompt_logprobs`; the job's parameters may have more for
            an echo's log probabilities.
        message_syntax: for reading the completions as messages; None if all text is content.
        field_names: the client's names of fields that errors may blame; see `naming_fields`.
    """

    is_streamed: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    times_pieces: bool = False
    reports_progress: bool = False
    calls_functions: bool = False
    echoed: tuple[str, ...] | None = None
    echo_starts: tuple[TokenIds, ...] = ()
    is_echo_only: bool = False
    num_prompt_logprobs: int | None = None
    message_syntax: MessageSyntax | None = None
    field_names: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An end: prompts to complete, `params.n` times each, or to turn into vectors.

    It comes as one frame, which takes the event loop 0.4 ms a MiB: 13 ms for the largest body.

    Attributes:
        service: as the body asks; the tenant of an API key goes first.
        pooling: how each prompt becomes a vector; None if it is completed.
        kv_transfer_params: of a transfer of the only prompt's blocks between engines.
        terms: what the endpoint's own answer needs from the request, in msgpack; see `packed`.
    """

    operation: Operation
    prompts: tuple[JobPrompt, ...]
    params: SamplingParams
    service: ServiceParams
    answer: AnswerOptions
    pooling: PromptPooling | None = None
    kv_transfer_params: KVTransferParams | None = None
    terms: bytes = b""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def max_tokens(self) -> int | None:
        """As in the parameters; None for vectors."""
        return None if self.pooling is not None else self.params.max_tokens

    def terms_as(self, kind: type[_Terms]) -> _Terms:
        """Return the terms, which are of this kind."""
        return msgspec.msgpack.decode(self.terms, type=kind)


def packed(terms: msgspec.Struct | None) -> bytes:
    """Return the `terms` of a job."""
    return b"" if terms is None else msgspec.msgpack.encode(terms)


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


Part = Piece | InputItem | Warned
End = Job | Answered | Refused | NeedsStored


def answered(answer: msgspec.Struct | dict[str, Any]) -> Iterator[Part | End]:
    """Yield an answer in pieces, and its end.

    Raises:
        InvalidRequestError: it is too long.
    """
    data = msgspec.json.encode(answer)
    if len(data) > MAX_ANSWER_BYTES:
        raise InvalidRequestError(
            f"the answer has {len(data)} bytes, over {MAX_ANSWER_BYTES}; ask for it in parts"
        )
    for start in range(0, len(data), _PIECE_BYTES):
        yield Piece(data[start : start + _PIECE_BYTES])
    yield Answered()
