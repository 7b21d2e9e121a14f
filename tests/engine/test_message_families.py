"""Messages out of what each family of models writes, in its own notation of calls."""

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason
from legato.language.message import known_syntaxes
from legato.language.message.known_syntaxes import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    DSML,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    KIMI,
    LFM,
    MINIMAX,
    MISTRAL_NAMED,
    QWEN_CODER,
)
from legato.language.message.message import Message, MessageReader, read_message
from legato.language.message.message_syntax import (
    ArgumentType,
    MessageSyntax,
    ToolCallSyntax,
    ToolParameters,
)
from tests.api.chat_templates import FAMILIES
from tests.api.written_calls import Call, tools_of, written
from tests.engine.messages import Calls, read_pieces
from tests.profiles import examples

_STRING, _ANY = ArgumentType(is_text=True), ArgumentType.any()


def _kinds(*names: str, is_text: bool = False) -> ArgumentType:
    return ArgumentType(kinds=names, is_text=is_text)


_TOOLS = {
    "f": ToolParameters(
        named={
            "s": _STRING,
            "n": _kinds("integer"),
            "x": _kinds("number", "null"),
            "l": _kinds("array"),
        }
    ),
    "g": ToolParameters(
        named={
            "b": _kinds("boolean"),
            "m": _kinds("null", is_text=True),
            "o": _kinds("object"),
        }
    ),
    **dict.fromkeys(("h", "a.b"), ToolParameters()),
}
_SYNTAXES = [getattr(known_syntaxes, name.upper()) for name in FAMILIES if name != "harmony"]


def _of(calls: ToolCallSyntax) -> MessageSyntax:
    return MessageSyntax(tool_calls=calls, tools=_TOOLS)


def _read(text: str, syntax: MessageSyntax, reason: FinishReason = FinishReason.STOP) -> Message:
    return read_message(text, reason, syntax)


def _calls(message: Message) -> Calls:
    return [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (
            QWEN_CODER,
            'Ok.\n\n<tool_call>\n<function=f>\n<parameter=s>\n\na "<b>"\n\n</parameter>\n'
            "<parameter=n>\n5.0\n</parameter>\n<parameter=x>\n.5\n</parameter>\n"
            "<parameter=l>\n[1]\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call><function=g><parameter=b>True</parameter><parameter=m>None</parameter>"
            "<parameter=o>[]</parameter><parameter=q>{}</parameter></function></tool_call>",
            "Ok.",
            [
                ("f", r'{"s": "\na \"<b>\"\n", "n": 5, "x": 0.5, "l": [1]}'),
                ("g", '{"b": true, "m": null, "o": "[]", "q": {}}'),
            ],
        ),
        # Two functions in a section, and text instead of a closing tag.
        (
            QWEN_CODER,
            "<tool_call>\n<function=f>\n</function>\n<function=g>\n<parameter=b>\nno\n"
            "</parameter>\nDone.",
            "Done.",
            [("f", "{}"), ("g", '{"b": "no"}')],
        ),
        # Qwen's general models write objects within the same marks.
        (
            QWEN_CODER,
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            None,
            [("f", '{"a": 1}')],
        ),
        (
            GLM,
            "\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>5</arg_value>\n<arg_key>l</arg_key>"
            "<arg_value>x</arg_value></tool_call>\n<tool_call>g</tool_call>",
            None,
            [("f", '{"s": "5", "l": "x"}'), ("g", "{}")],
        ),
        (
            MINIMAX,
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">\n</parameter>\n'
            '</invoke>\n<invoke name="h"><parameter name="z">007</parameter>'
            '<parameter name="y">7</parameter></invoke></minimax:tool_call>After.',
            "After.",
            [("f", r'{"s": "\n"}'), ("h", '{"z": "007", "y": 7}')],
        ),
        (
            DSML,
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="n" string="true">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="s" string="false">[5]</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            None,
            [("f", '{"n": "5", "s": [5]}')],
        ),
        (
            DEEPSEEK_FENCED,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
            "```json\n{}",
            None,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            GEMMA,
            '<|tool_call>call:f{a:<|"|>x "y", z}<|"|>,b:[1,-2.5e3,true,null,{c:{}}],d:two words,'
            '<|"|>e f<|"|>: <|"|><|"|>,}<tool_call|>',
            None,
            [
                (
                    "f",
                    r'{"a": "x \"y\", z}", "b": [1, -2.5e3, true, null, {"c": {}}], '
                    '"d": "two words", "e f": ""}',
                )
            ],
        ),
        (
            LFM,
            r"<|tool_call_start|>[f(a='it's', b="
            r'"\u00e9\x41\q\ud83d\ude00\n"'
            ", c=(1, .5, +3)), g(d={'k': [True, None], 2: \"'\"}, e=-1_0,)]<|tool_call_end|>Done.",
            "Done.",
            [
                (
                    "f",
                    r'{"a": "it' + r"'s" + r'", "b": "éA\\q\ud83d\ude00\n", "c": [1, 0.5, 3.0]}',
                ),
                ("g", '{"d": {"k": [true, null], "2": "\'"}, "e": -10.0}'),
            ],
        ),
        (
            LFM,
            '<|tool_call_start|>[{"name": "f", "arguments": {}}, {"name": "g"}]<|tool_call_end|>',
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        (
            GRANITE,
            '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
            None,
            [("f", '{"a": 1}')],
        ),
    ],
)
def test_calls(syntax: ToolCallSyntax, text: str, content: str | None, calls: Calls) -> None:
    message = _read(text, _of(syntax))
    assert message.content == content
    assert _calls(message) == calls
    assert message.finish_reason == "tool_calls"
    _check_cuts(text, _of(syntax))


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (QWEN_CODER, "<tool_call>\n<function=f x>"),
        (QWEN_CODER, "Use <tool_call> and <function=f>, I think"),
        (QWEN_CODER, "<tool_call>\n<function=>\n</function>"),
        (GLM, "<tool_call>f(x)</tool_call>"),
        (GLM, "<tool_call>f\n<arg_k"),
        (MINIMAX, '<minimax:tool_call>\n<invoke name="a b">'),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]"),
        (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f<|tool_call_argument_"),
        (GEMMA, "<|tool_call>call: f{}"),
        (LFM, "<|tool_call_start|>[I think (maybe)]<|tool_call_end|>"),
        (LFM, '<|tool_call_start|>[f("x")]<|tool_call_end|>'),
        (LFM, "f(a=1)"),
        (GRANITE, "<|tool_call|>none"),
        (MISTRAL_NAMED, "[TOOL_CALLS]" + "f" * 600 + "[ARGS]{}"),
    ],
)
def test_text_that_merely_looks_like_a_call_is_content(syntax: ToolCallSyntax, text: str) -> None:
    assert _read(text, _of(syntax)) == Message(text, None, (), "stop")
    _check_cuts(text, _of(syntax))


@pytest.mark.parametrize(
    ("syntax", "text", "arguments"),
    [
        (QWEN_CODER, f"<tool_call><function=f><parameter={'x' * 520}>y</parameter>", "{}"),
        (GLM, f"<tool_call>f<arg_key>s</arg_key>{' ' * 520}<arg_value>", "{}"),
        (GEMMA, f"<|tool_call>call:f{{a:x{' ' * 70},b:1}}<tool_call|>", '{"a": '),
        (GEMMA, f"<|tool_call>call:f{{a:{'x' * 520},b:1}}<tool_call|>", '{"a": '),
        (GEMMA, "<|tool_call>call:f{a:1 {},b:1}<tool_call|>", '{"a": 1'),
        (
            LFM,
            f"<|tool_call_start|>[f(a='b'{' ' * 70}, c='d')",
            f"""{{"a": "b'{" " * 70}, c='d"}}""",
        ),
        (LFM, "<|tool_call_start|>[f(a=1 + 2)]<|tool_call_end|>", '{"a": 1'),
    ],
)
def test_arguments_that_break_off(syntax: ToolCallSyntax, text: str, arguments: str) -> None:
    """What follows is content; no text makes a reader wait for more than a bound."""
    message = _read(text, _of(syntax))
    assert _calls(message) == [("f", arguments)]
    _check_cuts(text, _of(syntax))


def test_a_call_after_one_that_is_none() -> None:
    text = "<tool_call>\nf?\n<tool_call>\n<function=f>\n</function>\n</tool_call>"
    message = _read(text, _of(QWEN_CODER))
    assert (message.content, _calls(message)) == ("<tool_call>\nf?", [("f", "{}")])


def test_ids_that_models_write() -> None:
    calls: list[Call] = [("f", {}), ("g", {"a": 1})]
    message = _read(written(KIMI, *calls), _of(KIMI))
    assert [call.id for call in message.tool_calls] == ["functions.f:0", "functions.g:1"]
    first, second = _read(written(KIMI, ("f", {})) * 2, _of(KIMI)).tool_calls
    assert first.id == "functions.f:0" != second.id


@pytest.mark.parametrize("syntax", [QWEN_CODER, GLM, MINIMAX, DSML, GEMMA, LFM])
def test_a_string_goes_on_while_it_comes(syntax: ToolCallSyntax) -> None:
    text = written(syntax, ("f", {"s": "one two three"}))
    reader = MessageReader(_of(syntax))
    early = [reader.feed(char, None) for char in text[: text.index("three") + 2]]
    pieces = "".join(call.arguments for delta in early for call in delta.tool_calls)
    assert pieces.startswith('{"s": "one two')


HARMONY_CASES: list[tuple[str, tuple[str | None, str | None, Calls]]] = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        ("Hi", "Hm.", []),
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        ("I look.", "Hm.", [("f", '{"a": 1}')]),
    ),
    # The recipient may stand before the channel, and a part without arguments or a final mark.
    (
        "<|start|>assistant to=functions.a.b<|channel|>commentary json<|message|><|call|>"
        "<|channel|>final<|message|>Hi<|return|>",
        ("Hi", None, [("a.b", "{}")]),
    ),
    (" to=functions.f<|channel|>commentary<|message|> {}", (None, None, [("f", "{}")])),
    ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", (None, "1 + 1", [])),
    ("Hello <|there", ("Hello <|there", None, [])),
    ("<|channel|>analysis<|message|>Hm.<|end|>Hi <|there", ("Hi <|there", "Hm.", [])),
    ("<|channel|>analysis", ("", None, [])),
    (f"<|channel|>{'x' * 600}<|message|>Hi", (f"<|channel|>{'x' * 600}<|message|>Hi", None, [])),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY_CASES)
def test_harmony(text: str, expected: tuple[str | None, str | None, Calls]) -> None:
    message = _read(text, HARMONY)
    assert (message.content, message.reasoning, _calls(message)) == expected
    _check_cuts(text, HARMONY)


def test_calls_of_tools_that_were_not_shown_are_content() -> None:
    text, _ = HARMONY_CASES[1]
    message = _read(text, HARMONY.without_calls())
    assert (message.content, message.tool_calls) == ('I look.{"a": 1}', ())


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("9007199254740993", _kinds("integer"), "9007199254740993"),
        ("9007199254740993.0", _kinds("integer"), "9007199254740993"),
        ("-123456789012345678901234567890", _kinds("number"), "-123456789012345678901234567890"),
        ("9007199254740993", _kinds("integer", is_text=True), "9007199254740993"),
        ("9007199254740993", _ANY, "9007199254740993"),
        ("007", _kinds("integer"), "7"),
        ("007", _kinds("integer", is_text=True), '"007"'),
        ("1", _kinds("boolean"), "true"),
        ("1", _kinds("boolean", is_text=True), '"1"'),
        ("None", _kinds("null", is_text=True), "null"),
        ("5", ArgumentType(texts=("5",), values=("5",)), '"5"'),
        ('"c"', ArgumentType(texts=("c",), values=("null",)), '"c"'),
        ("2", ArgumentType(values=("1",), is_text=True), '"2"'),
        ("True", ArgumentType(values=("1",)), '"True"'),
        ("1.0", ArgumentType(values=("1",)), "1"),
    ],
)
def test_what_a_bare_text_stands_for(text: str, kind: ArgumentType, value: str) -> None:
    tools = {"f": ToolParameters(named={"a": kind})}
    called = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    message = _read(called, MessageSyntax(tool_calls=GLM, tools=tools))
    assert _calls(message) == [("f", f'{{"a": {value}}}')]


def test_harmony_calls_only_tools_that_were_offered() -> None:
    text, _ = HARMONY_CASES[1]
    offered = msgspec.structs.replace(HARMONY, tools={"g": ToolParameters()})
    assert _read(text, offered).content == 'I look.{"a": 1}'
    assert _calls(_read(text.replace("functions.f", "functions.g"), offered)) == [("g", '{"a": 1}')]


def test_a_call_that_is_cut_off() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\nsome te"
    message = _read(text, _of(QWEN_CODER), FinishReason.LENGTH)
    assert _calls(message) == [("f", '{"s": "some te')]
    assert message.finish_reason == "length"


_name = st.from_regex(r"[a-z_]\w{0,8}", fullmatch=True)
_text = st.text(st.characters(exclude_characters="<", codec="utf-8"))
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _text,
    lambda inner: st.lists(inner) | st.dictionaries(_name, inner),
    max_leaves=8,
)
_written = st.lists(
    st.tuples(st.from_regex(r"[\w.-]{1,20}", fullmatch=True), st.dictionaries(_name, _json)),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)


@given(_written, st.sampled_from(_SYNTAXES))
@examples(40)
def test_every_call_that_is_written_is_read(calls: list[Call], syntax: ToolCallSyntax) -> None:
    """Notations without escapes cannot have their marks in a string; so no string has any."""
    message = _read(
        written(syntax, *calls), MessageSyntax(tool_calls=syntax, tools=tools_of(*calls))
    )
    assert [(name, json.loads(arguments)) for name, arguments in _calls(message)] == calls
    assert message.content is None


@given(st.dictionaries(_name, _json))
@examples(50)
def test_literals_are_read_as_python_reads_them(arguments: dict[str, object]) -> None:
    call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    [(_, read)] = _calls(_read(f"{LFM.begin}[f({call})]{LFM.end}", _of(LFM)))
    assert json.loads(read) == arguments


_FRAGMENTS = [
    *(mark for syntax in _SYNTAXES for mark in syntax.marks if mark),
    *HARMONY.marks,
    *("analysis", "final", "assistant", " to=functions.f", "commentary", "functions.", "\n"),
    *("f", "s", "n", "a=", "f(a=", "f\n", "call:", "(", ")", "[", "]", "{", "}", "'", '"', ":"),
    *(r"\u00", r"\x4", r"\ud83d", "\\", ",", " ", "<", "x" * 70, " " * 70, "x" * 520, "True", ".5"),
    *(
        written(syntax, (name, {"s": "<", "n": 5, "l": [{"a": "}"}]}))
        for syntax in _SYNTAXES
        for name in ("f", "g" * 520)
    ),
]


@given(
    st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=3), max_size=20),
    st.sampled_from([*map(_of, _SYNTAXES), HARMONY]),
)
@examples(400)
def test_cuts_make_no_difference(fragments: list[str], syntax: MessageSyntax) -> None:
    text = "".join(fragments)
    whole = read_pieces([text], syntax)
    assert read_pieces(list(text), syntax) == whole
    assert read_pieces(fragments, syntax) == whole
    assert read_pieces(re.findall(r"(?s).{1,7}", text), syntax) == whole
    if syntax.channels is None and not whole[2]:
        assert whole[0] == text


def _check_cuts(text: str, syntax: MessageSyntax) -> None:
    """Check that letters one by one, and any two pieces, make the same message."""
    whole = read_pieces([text], syntax)
    assert read_pieces(list(text), syntax) == whole
    for at in range(1, len(text)):
        assert read_pieces([text[:at], text[at:]], syntax) == whole, text[:at]


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n" + '<parameter=a>{\\"</parameter>' * 10_000,
        '<function=f>\n<parameter=a>{\\"</parameter></function>' * 10_000,
    ],
    ids=["one call", "calls"],
)
def test_strings_that_are_left_open_are_read_in_linear_time(text: str) -> None:
    """Quadratic work would take hours: each string would be read to the end of the line."""
    message = _read(f"<tool_call>\n{text}\n", _of(QWEN_CODER))
    arguments = "".join(call.arguments for call in message.tool_calls)
    assert arguments.count('"a": ') == 10_000
