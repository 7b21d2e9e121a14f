"""MessageGrammar of messages in harmony, the format of gpt-oss, as `MessageGrammar`."""

from legato.server.requests.argument_grammar import ArgumentGrammar
from legato.server.requests.lark_text import ANY_TEXT, LarkText
from legato.server.requests.tools import ToolUse
from legato.text.message_syntax import Channels


class ChannelGrammar:
    """Makes grammars of the text after `<|start|>assistant`. A call ends its message."""

    def __init__(self, use: ToolUse, marks: Channels, lark: LarkText) -> None:
        self._tools = use.callable
        self._marks = marks
        self._lark = lark

    def calls(self) -> str:
        return self._grammar("call", *self._call_rules(is_lenient=True))

    def calls_or(self, content: str) -> str:
        calls = self._call_rules(is_lenient=True)
        return self._grammar("(call | final content)", f"content: {content}", *calls)

    def reasoned(self, content: str) -> str:
        return self._grammar("final content", f"content: {content}")

    def free(self) -> str:
        end = f"(call | final {ANY_TEXT})"
        return self._grammar(f"said* {end}", *self._call_rules(is_lenient=False))

    def _grammar(self, last: str, *rules: str) -> str:
        """Return a grammar of reasoning and of what is last."""
        begin = self._lark.literal(f"{self._marks.start}assistant")
        return "\n".join(
            [
                f"start: thought? {last}",
                f"thought: {self._header('analysis')} rest {begin}",
                f"said: {self._header('commentary')} rest {begin}",
                f"final: {self._header('final')}",
                *self._lark.until("rest", self._marks.end),
                *rules,
            ]
        )

    def _header(self, channel: str) -> str:
        return self._lark.literal(f"{self._marks.channel}{channel}{self._marks.message}")

    def _call_rules(self, *, is_lenient: bool) -> list[str]:
        """Args: is_lenient: as of `ArgumentGrammar.of`."""
        arguments = ArgumentGrammar(None, self._lark)
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            written = arguments.of(tool.function, is_lenient=is_lenient)
            recipient = f"commentary to=functions.{tool.function.name} "
            header = self._header(f"{recipient}{self._marks.constrain}json")
            rules.append(f"call_{i}: {header} {written}")
        return rules + arguments.rules
