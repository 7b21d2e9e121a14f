"""How a model writes a message: where its reasoning and its tool calls stand in the text."""

import msgspec


class MessageSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """What a model writes around the parts of its messages. Without any, all text is content."""
