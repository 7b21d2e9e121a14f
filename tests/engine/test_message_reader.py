"""Messages out of what models write: content, reasoning and tool calls, however the text is cut."""

import gc
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason
from legato.language.message.known_syntaxes import (
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LFM,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN_CODER,
)
from legato.language.message.message import Message, read_message
from legato.language.message.message_syntax import (
    Marks,
    MessageSyntax,
    ToolCallSyntax,
    ToolParameters,
)
from tests.api.written_calls import written
from tests.engine.messages import Calls, read_pieces
from tests.profiles import examples

_THINK = Marks("<think>", "</think>")
_SYNTAXES = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED]


def _read(text: str, syntax: MessageSyntax, reason: FinishReason = FinishReason.STOP) -> Message:
    return read_message(text, reason, syntax)


def _calls(message: Message) -> Calls:
    return [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (
            HERMES,
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": [1, "}"]}}\n</tool_call>',
            "Let me see.",
            [("f", '{"x": [1, "}"]}')],
        ),
        (
            HERMES,
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>',
            None,
            [("f", "{}"), ("g", '{"a": 1}')],
        ),
        # SmolLM2 writes a list; others leave out brackets, marks and arguments.
        (
            HERMES,
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>Done.',
            "Done.",
            [("f", '{"a": 1}')],
        ),
        (
            HERMES,
            '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>',
            None,
            [("f", '{"a": 1}')],
        ),
        (
            HERMES,
            '<tool_call>{"name": "a\\u00e9", "arguments": {"a":"\\""}, "id": {}}',
            None,
            [("aé", '{"a":"\\""}')],
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}', None, [("f", "{}")]),
        (
            LLAMA,
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            None,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            LLAMA,
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
            None,
            [("f", "{}")],
        ),
        (
            LLAMA,
            'It is {"name": "f", "parameters": {}}',
            'It is {"name": "f", "parameters": {}}',
            [],
        ),
        (LLAMA, ' {"city": "Paris"} ', ' {"city": "Paris"} ', []),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": []}}]',
            None,
            [("f", "{}"), ("g", '{"b": []}')],
        ),
        (
            MISTRAL_NAMED,
            'Well. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
            "Well.",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
    ],
)
def test_calls(syntax: ToolCallSyntax, text: str, content: str | None, calls: Calls) -> None:
    message = _read(text, MessageSyntax(tool_calls=syntax))
    assert message.content == content
    assert _calls(message) == calls
    assert message.finish_reason == ("tool_calls" if calls else "stop")
    assert len({call.id for call in message.tool_calls}) == len(calls)
    if syntax.id_chars:
        assert all(len(call.id) == syntax.id_chars for call in message.tool_calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a <tool_call>\n",
        "a < b and <tool_ca",
        "<tool_call>I would call f</tool_call>",
        '<tool_call>{"nome": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call> \n',
        '<tool_call>{"name": "f\\x", "arguments": {}}',
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"name": "f", "argume',
        "<tool_call>[[1]]",
        "<tool_call>{}",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    message = _read(text, MessageSyntax(tool_calls=HERMES))
    assert message == Message(text, None, (), "stop")


_OBJECTS = [
    '{"name": "Alice", "age": 30}',
    '{"type": "dog", "name": "Rex"}',
    '{"name": "g", "parameters": {"a": 1}}',
    '{"id": "x", "name": "g", "arguments": "{}"}',
]


@pytest.mark.parametrize("text", _OBJECTS)
def test_a_call_names_a_tool_that_was_offered(text: str) -> None:
    syntax = MessageSyntax(tool_calls=LLAMA, tools={"f": ToolParameters()})
    named = text.replace("Alice", "f").replace("Rex", "f").replace('"g"', '"f"')
    for pieces in ([text], list(text), [text[:12], text[12:]]):
        assert read_pieces(pieces, syntax) == (text, "", [], "stop")
    [(name, _)] = _calls(_read(named, syntax))
    assert name == "f"


@pytest.mark.parametrize("syntax", [*_SYNTAXES, QWEN_CODER, GLM, GEMMA, LFM])
def test_a_call_of_another_name_is_text(syntax: ToolCallSyntax) -> None:
    offered = MessageSyntax(tool_calls=syntax, tools={"f": ToolParameters()})
    text = f"Well.{written(syntax, ('g', {'a': 'x'}))}"
    if syntax.is_bare:
        text = text.removeprefix("Well.")
    assert _read(text, offered) == Message(text, None, (), "stop")
    assert _calls(_read(text.replace("g", "f", 1), offered)) == [("f", '{"a": "x"}')]


@pytest.mark.parametrize(
    "head", ['{"name": "f", "parameters": ', '{"type": "function",\n "name": "f", "arguments": ']
)
def test_a_bare_call_that_is_cut_before_its_arguments_is_nothing(head: str) -> None:
    syntax = MessageSyntax(tool_calls=LLAMA, tools={"f": ToolParameters()})
    for end in range(1, len(head) + 1):
        cut = head[:end]
        assert _read(cut, syntax, FinishReason.LENGTH) == Message("", None, (), "length"), cut
        assert _read(cut, syntax).content == cut
    for text in ('{"name": "g', '{"names', '{"name": "f", "age": 3', '{"type": "dog"'):
        assert _read(text, syntax, FinishReason.LENGTH).content == text


def test_a_call_that_is_cut_off_is_told_so() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    message = _read(text, MessageSyntax(tool_calls=HERMES), FinishReason.LENGTH)
    assert _calls(message) == [("f", '{"a": "b')]
    assert message.finish_reason == "length"


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning(is_open: bool) -> None:
    syntax = MessageSyntax(reasoning=_THINK, is_reasoning_open=is_open, tool_calls=HERMES)
    text = ("" if is_open else " <think>") + "\nI <think>, therefore\n\n</think>\n\nHello\n"
    message = _read(text, syntax)
    assert (message.reasoning, message.content) == ("I <think>, therefore", "Hello\n")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert _calls(_read(text + call, syntax)) == [("f", "{}")]
    unfinished = _read(text.partition("</")[0], syntax, FinishReason.LENGTH)
    assert (unfinished.reasoning, unfinished.content) == ("I <think>, therefore", None)
    only_calls = _read(text.removesuffix("Hello\n") + call, syntax)
    assert (only_calls.content, len(only_calls.tool_calls)) == (None, 1)


def test_only_the_beginning_of_a_message_is_reasoning() -> None:
    text = "Write <think> before you think, and </think> after."
    assert _read(text, MessageSyntax(reasoning=_THINK)).content == text


_FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", '{"name": "f", "arguments": ', '{"name": "g", "parameters": {"a": '),
    *('"name"', '"arguments"', '"id": "1", ', ": ", "{", "}", "[", "]", ",", ";", '"', "\\", "é"),
    *(" ", "\n", "f", "null", "<", '{"a": "}"}', "x" * 600),
    *(written(syntax, (name, {"a": ["}"]})) for syntax in _SYNTAXES for name in ("f", "g" * 510)),
    '<tool_call>{"arguments": {}, "name": "f"}</tool_call>',
]
_texts = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=3), max_size=30)
_syntaxes = st.builds(
    MessageSyntax,
    reasoning=st.none() | st.just(_THINK),
    tool_calls=st.none() | st.sampled_from(_SYNTAXES),
)


@given(_texts, _syntaxes, st.booleans())
@examples(150)
def test_cuts_make_no_difference(
    fragments: list[str], syntax: MessageSyntax, is_open: bool
) -> None:
    if is_open and syntax.reasoning is not None:
        syntax = MessageSyntax(
            reasoning=_THINK, is_reasoning_open=True, tool_calls=syntax.tool_calls
        )
    text = "".join(fragments)
    whole = read_pieces([text], syntax)
    assert read_pieces(list(text), syntax) == whole
    assert read_pieces(fragments, syntax) == whole
    message = _read(text, syntax)
    assert (message.content or "", message.reasoning or "", _calls(message)) == whole[:3]
    if syntax.reasoning is None and not whole[2]:
        assert whole[0] == text


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
_written = st.lists(
    st.tuples(st.from_regex(r"[\w.-]{1,20}", fullmatch=True), st.dictionaries(st.text(), _json)),
    min_size=1,
    max_size=3,
)


@given(_written, st.sampled_from(_SYNTAXES))
@examples(50)
def test_every_call_that_is_written_is_read(
    calls: list[tuple[str, dict[str, object]]], syntax: ToolCallSyntax
) -> None:
    message = _read(written(syntax, *calls), MessageSyntax(tool_calls=syntax))
    read = [(name, json.loads(arguments)) for name, arguments in _calls(message)]
    assert read == calls
    assert message.content is None


@pytest.mark.parametrize("syntax", [*_SYNTAXES, QWEN_CODER, GLM, GEMMA, LFM, HARMONY])
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        '<tool_call>{"name": "f", "x": "',
        '<tool_call>{"name": "f", "arguments": {',
        "[TOOL_CALLS][",
        "[TOOL_CALLS]",
        "{",
        '{"',
        "\\",
        " ",
        "<",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "<tool_call>\n<function=f>\n<parameter=s>\n",
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>",
        "<|tool_call>call:f{",
        "<|tool_call_start|>[f(a='",
        "<|tool_call_start|>[f(a=[",
        "' ",
        "<function=f",
        "<|channel|>x",
    ],
)
def test_time_is_linear(syntax: ToolCallSyntax | MessageSyntax, unit: str) -> None:
    """Of texts that a reader could go back over again and again."""
    if isinstance(syntax, ToolCallSyntax):
        syntax = MessageSyntax(reasoning=_THINK, tool_calls=syntax)

    def time_s(num_chars: int) -> float:
        pieces = [unit] * (num_chars // len(unit))
        gc.disable()  # one collection visits the objects of the whole test process
        try:
            started_s = time.process_time()
            read_pieces(pieces, syntax)
            _read("".join(pieces), syntax)
            return time.process_time() - started_s
        finally:
            gc.enable()

    time_s(1_000)
    short_s = min(time_s(2_000) for _ in range(3))
    assert time_s(32_000) < 16 * 8 * max(short_s, 5e-4)
