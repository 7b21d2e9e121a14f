"""Messages that come in pieces, as streams bring them."""

from legato.core.outputs import FinishReason
from legato.language.message.message import MessageReader
from legato.language.message.message_syntax import MessageSyntax

Calls = list[tuple[str, str]]
"""Name and arguments of each."""


def read_pieces(pieces: list[str], syntax: MessageSyntax) -> tuple[str, str, Calls, str | None]:
    """Return content, reasoning, calls and reason of a message that comes in pieces."""
    reader = MessageReader(syntax)
    deltas = [reader.feed(piece, None) for piece in pieces]
    deltas.append(reader.feed("", FinishReason.STOP))
    calls: Calls = []
    for delta in deltas:
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.id
                assert call.index == len(calls)
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            name, arguments = calls.pop()
            calls.append((name, arguments + call.arguments))
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return content, reasoning, calls, deltas[-1].finish_reason
