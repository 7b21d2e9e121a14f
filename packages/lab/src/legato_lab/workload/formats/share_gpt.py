"""ShareGPT: a JSON array of conversations, whose texts a tokenizer must measure.

Each answer makes a request: its prompt is the conversation before it, without the marks of a chat
template. Requests have no times, and are in the order of the file: a conversation's requests follow
each other.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import msgspec

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import WorkloadRequest
from legato_lab.workload.formats.rows import Rows

CountTokens = Callable[[Sequence[str]], list[int]]
"""Returns the number of tokens of each text."""

_HUMANS = {"human", "user"}
_MODELS = {"gpt", "chatgpt", "assistant", "bing", "bard", "model"}


class _Message(msgspec.Struct, frozen=True):
    sender: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Message]


_decode_file = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_conversation = msgspec.json.Decoder(_Conversation).decode


def share_gpt_rows(text: str, count_tokens: CountTokens) -> Rows:
    """Return a file's rows, each a conversation.

    Raises:
        ConfigError: it is no JSON array.
    """
    try:
        found = _decode_file(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"neither conversations (JSON) nor anything else known: {error}"
        ) from error
    places = (f" conversation {number}" for number in range(1, len(found) + 1))
    return Rows(
        zip(places, found, strict=True),
        lambda raw: _requests(_decode_conversation(raw).conversations, count_tokens),
        are_slow=True,
    )


def _requests(messages: list[_Message], count_tokens: CountTokens) -> list[WorkloadRequest]:
    counts = count_tokens([message.value for message in messages])
    return [
        WorkloadRequest(0.0, num_before, num_tokens)
        for (asked, answered), num_before, num_tokens in zip(
            pairwise(messages), accumulate(counts), counts[1:], strict=False
        )
        if asked.sender in _HUMANS and answered.sender in _MODELS and num_before and num_tokens
    ]
