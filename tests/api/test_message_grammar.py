"""Grammars of tool calls, as llguidance reads them, on SmolLM2's vocabulary."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from legato.api.bodies.chat_tools import Choice, Tool, functions_of, tool_use
from legato.api.openai.chat_body import ChatRequest
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.structured_outputs import StructuredOutputs
from legato.grammar.matcher import Grammar, compile_grammar
from legato.language.forms import check
from legato.language.forms.check import GrammarChecker
from legato.language.forms.message_grammar import (
    MAX_PARALLEL_CALLS,
    MessageForm,
    message_form,
    message_grammar,
)
from legato.language.message import known_syntaxes
from legato.language.message.known_syntaxes import HARMONY, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED
from legato.language.message.message import read_message
from legato.language.message.message_syntax import (
    ArgumentTags,
    Marks,
    MessageSyntax,
    NamedCall,
    ToolCallSyntax,
    ToolParameters,
)
from tests.api.chat_templates import FAMILIES
from tests.api.written_calls import written
from tests.grammar.default_tokens import default_llguidance, default_tokenizer

_UNIT = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
_FAMILIES = {name: getattr(known_syntaxes, name.upper()) for name in (*FAMILIES, "lfm_json")}
_SYNTAXES = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED]
_SYNTAXES += [syntax for syntax in _FAMILIES.values() if syntax is not HARMONY]


def _tool(name: str, **function: Any) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, **function}})


_LOOSE, _STRICT = _tool("loose", parameters=_UNIT), _tool("strict", parameters=_UNIT, strict=True)


class Held:
    """Says what a grammar lets through."""

    def __init__(
        self,
        syntax: MessageSyntax,
        *tools: Tool,
        choice: str = "auto",
        is_parallel: bool = True,
        content: str | None = None,
    ) -> None:
        wanted = Choice.model_validate({"type": choice})
        use = tool_use(functions_of(tools), wanted, is_parallel=is_parallel, param="tool_choice")
        self.grammar = message_grammar(
            use, syntax, default_tokenizer().special_marks(syntax), content=content
        )

    def takes(self, text: str) -> bool:
        """Whether the whole text may be an answer."""
        assert self.grammar is not None
        matcher = LLMatcher(default_llguidance(), self.grammar)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = default_tokenizer().encode(text, add_special_tokens=False)
        num_taken = matcher.try_consume_tokens(token_ids)
        return num_taken == len(token_ids) and matcher.is_accepting()


_RIGHT: dict[str, Any] = {"unit": "c"}
_WRONG: dict[str, Any] = {"unit": "k"}


@pytest.mark.parametrize("syntax", _SYNTAXES)
def test_required_calls(syntax: ToolCallSyntax) -> None:
    plain = MessageSyntax(tool_calls=syntax)
    held = Held(plain, _LOOSE, _STRICT, choice="required")
    for name in ("loose", "strict"):
        assert held.takes(written(syntax, (name, _RIGHT)))
        assert not held.takes(written(syntax, (name, _WRONG)))
    assert not held.takes(written(syntax, ("other", _RIGHT)))
    assert not held.takes("Hello")
    assert not held.takes("")
    two = written(syntax, ("loose", _RIGHT), ("strict", _RIGHT))
    assert held.takes(two)
    assert held.takes(written(syntax, *[("loose", _RIGHT)] * MAX_PARALLEL_CALLS))
    assert not held.takes(written(syntax, *[("loose", _RIGHT)] * (MAX_PARALLEL_CALLS + 1)))
    one = Held(plain, _LOOSE, _STRICT, choice="required", is_parallel=False)
    assert one.takes(written(syntax, ("loose", _RIGHT)))
    assert not one.takes(two)


def test_alternatives_of_a_tool_that_is_not_strict_may_overlap() -> None:
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    tool = _tool("f", parameters={"type": "object", "properties": {"x": either}, "required": ["x"]})
    held = Held(MessageSyntax(tool_calls=HERMES), tool, choice="required")
    assert held.takes(written(HERMES, ("f", {"x": 1.5})))
    assert not held.takes(written(HERMES, ("f", {"x": "1"})))


@pytest.mark.parametrize("syntax", _SYNTAXES)
def test_calls_that_are_free(syntax: ToolCallSyntax) -> None:
    plain = MessageSyntax(tool_calls=syntax)
    held = Held(plain, _LOOSE, _STRICT)
    text = "" if syntax.is_bare else "I look.\n"
    assert held.takes("Hello")
    assert held.takes("")
    assert held.takes(" \n Hello {")
    assert not held.takes(" {") or not syntax.is_bare
    assert held.takes(text + written(syntax, ("strict", _RIGHT)))
    assert not held.takes(text + written(syntax, ("strict", _WRONG)))
    assert held.takes(text + written(syntax, ("loose", _WRONG)))
    two = text + written(syntax, ("loose", _RIGHT), ("strict", _RIGHT))
    assert held.takes(two)
    one = Held(plain, _LOOSE, is_parallel=False)
    assert one.takes("Hello")
    assert one.takes(text + written(syntax, ("loose", _WRONG)))
    assert not one.takes(two)


def test_nothing_to_hold_to_is_no_grammar() -> None:
    plain = MessageSyntax(tool_calls=HERMES)
    assert Held(plain, _LOOSE).grammar is None
    assert Held(plain.without_calls()).grammar is None


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("has_special_end", [True, False])
def test_reasoning_goes_before_calls(is_open: bool, has_special_end: bool) -> None:
    marks = Marks("<repo_name>", "<file_sep>") if has_special_end else Marks("<think>", "</think>")
    syntax = MessageSyntax(reasoning=marks, is_reasoning_open=is_open, tool_calls=HERMES)
    held = Held(syntax, _STRICT, choice="required")
    call = written(HERMES, ("strict", _RIGHT))
    thought = f"{'' if is_open else marks.begin}\nWell?\n{marks.end}\n\n"
    assert held.takes(thought + call)
    assert held.takes(call) != is_open
    assert not held.takes(thought)
    assert not held.takes(thought + written(HERMES, ("strict", _WRONG)))


def test_marks_that_are_special_tokens() -> None:
    """Text of theirs is no mark, and they stand in no text."""
    calls = ToolCallSyntax(begin="<repo_name>", end="<file_sep>", space="\n")
    syntax = MessageSyntax(tool_calls=calls)
    for choice in ("required", "auto"):
        held = Held(syntax, _STRICT, choice=choice)
        assert held.takes('<repo_name>\n{"name": "strict", "arguments": {"unit": "c"}}\n<file_sep>')
        assert not held.takes(
            '<repo_name>\n{"name": "strict", "arguments": {"unit": "k"}}\n<file_sep>'
        )


@pytest.mark.parametrize("syntax", _SYNTAXES)
def test_content_of_a_form_or_calls(syntax: ToolCallSyntax) -> None:
    content = '%json {"type": "object", "properties": {"name": {"const": 5}}, "required": ["name"]}'
    held = Held(MessageSyntax(tool_calls=syntax), _LOOSE, content=content)
    begin = syntax.begin if syntax.is_bare else ""
    assert held.takes('{"name": 5}')
    assert held.takes(begin + written(syntax, ("loose", _RIGHT)))
    assert not held.takes(begin + written(syntax, ("loose", _WRONG)))
    assert not held.takes('{"name": 6}')
    assert not held.takes("Hello")


_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["c", "f"]},
        "when": {"$ref": "#/$defs/when"},
        "is_open": {"type": "boolean"},
    },
    "required": ["city", "unit"],
    "$defs": {
        "when": {
            "type": "object",
            "properties": {"at": {"type": ["string", "null"]}, "on": {"type": "array"}},
            "required": ["at"],
        }
    },
}


@pytest.mark.parametrize("syntax", _SYNTAXES)
def test_arguments_of_every_type(syntax: ToolCallSyntax) -> None:
    held = Held(MessageSyntax(tool_calls=syntax), _tool("f", parameters=_SCHEMA), choice="required")

    def takes(**arguments: Any) -> bool:
        return held.takes(written(syntax, ("f", arguments)))

    assert takes(city="A b", unit="c")
    assert takes(city="", days=3, unit="f", is_open=True)
    assert takes(city="<b>", unit="f", when={"at": "5", "on": [1, "x", {"y": None}]})
    assert takes(city="x", unit="f", when={"at": None})
    assert not takes(unit="c")
    assert takes(city="x" * 10, unit="c")
    assert not takes(city="x" * 11, unit="c")
    assert not takes(city="A", unit="k")
    assert not takes(city="A", days="three", unit="c")
    assert not takes(city="A", days=0, unit="c")
    assert not takes(city="A", unit="c", is_open=1)
    assert not takes(city="A", unit="c", when=[])
    assert not takes(city="A", unit="c", other=1)
    nothing = Held(MessageSyntax(tool_calls=syntax), _tool("f"), choice="required")
    assert nothing.takes(written(syntax, ("f", {})))
    optional = _tool("f", parameters={"type": "object", "properties": {"a": {}, "b": {}}})
    loose = Held(MessageSyntax(tool_calls=syntax), optional, choice="required")
    for arguments in ({}, {"a": 1}, {"b": "x"}, {"a": [True], "b": 1}):
        assert loose.takes(written(syntax, ("f", arguments)))


@pytest.mark.parametrize("name", ["qwen_coder", "minimax", "dsml", "gemma", "lfm"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a b": {"type": "string", "pattern": "^x$"}}},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_what_a_notation_cannot_hold_is_refused_if_it_is_strict(
    name: str, parameters: dict[str, Any]
) -> None:
    syntax = MessageSyntax(tool_calls=_FAMILIES[name])
    with pytest.raises(InvalidRequestError) as refused:
        Held(syntax, _tool("f", parameters=parameters, strict=True), choice="required")
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"grammar": 'start: "{" /[^}]*/ "}}"'}},
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_answer_of_a_form_is_no_call_without_a_mark(
    form: dict[str, Any], is_strict: bool
) -> None:
    tool = _tool("f", parameters=_UNIT, strict=is_strict).model_dump()
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], **form}
    checker = GrammarChecker(lambda: default_tokenizer().vocabulary)
    syntax = MessageSyntax(tool_calls=LLAMA, tools={"f": ToolParameters()})
    request = ChatRequest.model_validate(body)
    held = message_form(request.tool_use, request.output_form, syntax, checker, {})
    text = '{"name": "f", "parameters": {"unit": "c"}}'
    assert held.outputs is not None
    assert held.outputs.grammar is not None
    matcher = LLMatcher(default_llguidance(), held.outputs.grammar)
    token_ids = default_tokenizer().encode(text, add_special_tokens=False)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert read_message(text, FinishReason.STOP, held.syntax).content == text
    called = read_message(f"<|python_tag|>{text}", FinishReason.STOP, held.syntax)
    assert [call.name for call in called.tool_calls] == ["f"]


def test_marks_with_a_special_token_in_them() -> None:
    tags = ArgumentTags(begin="<<repo_name>arg ", name_end=">", end="</<repo_name>arg>")
    call = NamedCall(begin="<<repo_name>call ", name_end=">", arguments=tags, end="<end>")
    syntax = ToolCallSyntax(begin="<<repo_name>calls>", end="</<repo_name>calls>", call=call)
    held = Held(MessageSyntax(tool_calls=syntax), _STRICT, _tool("any"))
    for text in ("", "a < b <<", "a <"):
        assert held.takes(text)
        assert held.takes(text + written(syntax, ("strict", _RIGHT)))
        assert not held.takes(text + written(syntax, ("strict", _WRONG)))
    assert held.takes(written(syntax, ("any", {"k": "a < b </", "l": "<arg>"})) + "Done <")


def test_harmony() -> None:
    call, wrong = written(HARMONY, ("strict", _RIGHT)), written(HARMONY, ("strict", _WRONG))
    thought = "<|channel|>analysis<|message|>Well?<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    held = Held(HARMONY, _LOOSE, _STRICT, choice="required")
    for before in ("", thought):
        assert held.takes(before + call)
        assert held.takes(before + written(HARMONY, ("loose", _RIGHT)))
        assert not held.takes(before + wrong)
        assert not held.takes(f"{before}{final}Hello")
    free = Held(HARMONY, _LOOSE, _STRICT)
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for text in (f"{final}Hello", call, thought + said + call, written(HARMONY, ("loose", _WRONG))):
        assert free.takes(text)
    assert not free.takes(thought + wrong)
    held = Held(HARMONY, content='("a" | "b")')
    assert held.takes(f"{thought}{final}a")
    assert not held.takes(f"{thought}{final}c")
    held = Held(HARMONY, _STRICT, content='("a" | "b")')
    assert held.takes(f"{final}a")
    assert held.takes(call)
    assert Held(HARMONY, _LOOSE).grammar is None


def test_content_of_a_form_behind_reasoning() -> None:
    held = Held(MessageSyntax(reasoning=Marks("<think>", "</think>")), content='("a" | "b")')
    assert held.takes("<think>\nA or b?\n</think>\n\nb")
    assert held.takes("a")
    assert not held.takes("c")
    assert Held(MessageSyntax(), content='"a"').grammar is None


@pytest.mark.parametrize("syntax", _SYNTAXES)
def test_names_and_schemas_of_every_kind_compile(syntax: ToolCallSyntax) -> None:
    # Python's keywords are no other names.
    name = "a" if syntax is known_syntaxes.LFM else "a\"\n/'"
    parameters = {
        "type": "object",
        "x-guidance": {"whitespace_flexible": True},
        "properties": {
            name: {"type": "string", "format": "no-such-format"},
            "b": {"$ref": "#/$defs/b"},
        },
        "required": [name],
        "$defs": {"b": {"type": ["integer", "null"], "description": 'a "b" \\ #'}},
    }
    held = Held(
        MessageSyntax(tool_calls=syntax),
        _tool("a.b-c_9", parameters=parameters),
        _tool("none"),
        _tool("any", parameters={"type": "object"}),
        choice="required",
    )
    assert held.takes(written(syntax, ("a.b-c_9", {name: "x", "b": None})))
    assert held.takes(written(syntax, ("none", {})))
    assert not held.takes(written(syntax, ("none", {"a": 1})))
    assert held.takes(written(syntax, ("any", {"a": 1})))


_LINES = r"""
start: "begin" LF line+ "end"
line: "+" /(.*)/ LF
%import common.LF
"""
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("syntax", [*_SYNTAXES, HARMONY])
def test_the_input_of_a_custom_tool(syntax: ToolCallSyntax | MessageSyntax, choice: str) -> None:
    tool = _tool("patch", parameters=_INPUT, strict=True)
    tool.function.input_grammar = _LINES
    plain = syntax if isinstance(syntax, MessageSyntax) else MessageSyntax(tool_calls=syntax)
    held = Held(plain, tool, choice=choice)
    right = 'begin\n+say "hi"\\n\n+\tend\nend'
    assert held.takes(written(syntax, ("patch", {"input": right})))
    assert not held.takes(written(syntax, ("patch", {"input": right[1:]})))
    assert not held.takes(written(syntax, ("patch", {"input": right + "\n+"})))


_NEVER = r"[^\s\S]"
_THINK = MessageSyntax(
    reasoning=Marks("<think>", "</think>"), tool_calls=HERMES, is_reasoning_open=True
)


def _form_of(syntax: MessageSyntax, **fields: Any) -> MessageForm:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = ChatRequest.model_validate(body)
    checker = GrammarChecker(lambda: default_tokenizer().vocabulary)
    marks = default_tokenizer().special_marks(syntax)
    return message_form(request.tool_use, request.output_form, syntax, checker, marks)


@pytest.mark.parametrize("syntax", [MessageSyntax(tool_calls=HERMES), _THINK, HARMONY])
@pytest.mark.parametrize("name", ["regex", "choice", "json"])
def test_a_form_that_cannot_be_met_is_named_beside_tools(syntax: MessageSyntax, name: str) -> None:
    """A pattern without any match fails alone only: a grammar with a call beside it compiles."""
    value = {"regex": _NEVER, "choice": ["a" * 300_000], "json": {"type": "strin"}}[name]
    tools = [_tool("f", parameters=_UNIT).model_dump()]
    with pytest.raises(InvalidRequestError) as refused:
        _form_of(syntax, tools=tools, structured_outputs={name: value})
    assert refused.value.param == f"structured_outputs.{name}"


def test_a_tool_that_cannot_be_called_is_named_beside_a_form() -> None:
    tools = [_LOOSE, _tool("f", parameters={"properties": {"a": {"format": "no"}}}, strict=True)]
    with pytest.raises(InvalidRequestError, match="#/properties/a of the schema") as refused:
        _form_of(
            MessageSyntax(tool_calls=HERMES),
            tools=[tool.model_dump() for tool in tools],
            response_format={"type": "json_object"},
        )
    assert refused.value.param == "tools.1.function.parameters"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_an_input_that_fails_only_alone_is_named(choice: str) -> None:
    """The grammar of all calls compiles without it: the model would have the other tool."""
    patch = _tool("patch", parameters=_INPUT, strict=True)
    patch.function.input_grammar = f"start: /{_NEVER}/"
    syntax = MessageSyntax(tool_calls=HERMES)
    checker = GrammarChecker(lambda: default_tokenizer().vocabulary)
    wanted = Choice.model_validate({"type": choice})
    use = tool_use(functions_of([_STRICT, patch]), wanted, is_parallel=True, param="tool_choice")
    grammar = message_grammar(use, syntax, {})
    assert checker.resolve(StructuredOutputs(grammar=grammar)).grammar
    with pytest.raises(InvalidRequestError, match="no output at all") as refused:
        message_form(use, None, syntax, checker, {})
    assert refused.value.param == "tools.1.function.parameters"


@pytest.mark.parametrize("syntax", [MessageSyntax(tool_calls=HERMES), _THINK, HARMONY])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [_LOOSE.model_dump()], "response_format": {"type": "json_object"}},
        {"tools": [_LOOSE.model_dump(), _STRICT.model_dump()]},
        {"tools": [_LOOSE.model_dump()], "structured_outputs": {"grammar": 'start: "a"'}},
        {"structured_outputs": {"regex": "a"}},
    ],
)
def test_a_form_is_compiled_once(
    syntax: MessageSyntax, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counted(tokenizer: LLTokenizer, source: str) -> Grammar:
        compiled.append(source)
        return compile_grammar(tokenizer, source)

    monkeypatch.setattr(check, "compile_grammar", counted)
    held = _form_of(syntax, **fields)
    assert held.outputs is not None
    assert compiled.count(held.outputs.grammar or "") == 1
    is_framed = syntax.reasoning is not None or syntax.channels is not None
    # A pattern that becomes a part is compiled alone, too.
    assert len(compiled) == 1 + (is_framed and "regex" in fields.get("structured_outputs", {}))
