"""Calls sampled from tools' grammars, read back: their arguments satisfy the tools' schemas."""

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from legato.api.bodies.chat_tools import Choice, Tool, functions_of, tool_use
from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.structured_outputs import StructuredOutputs
from legato.core.vocabulary import Vocabulary
from legato.grammar.matcher import compile_grammar
from legato.grammar.tokens import grammar_tokenizer
from legato.language.conversation.prompt import tools_for_template
from legato.language.conversation.template import tool_parameters
from legato.language.forms.check import GrammarChecker
from legato.language.forms.message_grammar import message_grammar
from legato.language.message import known_syntaxes
from legato.language.message.message import MessageReader, read_message
from legato.language.message.message_syntax import MessageSyntax, ToolCallSyntax
from tests.api.written_calls import written
from tests.profiles import examples

_SYNTAXES = {
    name: syntax
    for name, syntax in vars(known_syntaxes).items()
    if isinstance(syntax, ToolCallSyntax) or name == "HARMONY"
}
_BARE_TEXT = ("QWEN_CODER", "GLM", "GLM_COMPACT", "MINIMAX", "DSML", "DSML_TOOLS")
_OWN_NOTATION = (*_BARE_TEXT, "GEMMA", "LFM")
_VOCABULARY = Vocabulary.of([bytes([byte]) for byte in range(256)], frozenset())
_TOKENIZER = grammar_tokenizer(_VOCABULARY)
_CHECKER = GrammarChecker(lambda: _VOCABULARY)
_END = 256
_MOST_BYTES = 400


class Called:
    """A tool that a model must call, in one syntax."""

    def __init__(self, name: str, parameters: dict[str, Any], *, is_strict: bool) -> None:
        function = {"name": "f", "parameters": parameters, "strict": is_strict}
        tool = Tool.model_validate({"type": "function", "function": function})
        functions = functions_of([tool])
        calls = _SYNTAXES[name]
        offered = tool_parameters(tools_for_template(functions), has_types=True)
        self.syntax = (
            MessageSyntax(tool_calls=calls, tools=offered)
            if isinstance(calls, ToolCallSyntax)
            else calls
        )
        use = tool_use(functions, Choice(type="required"), is_parallel=True, param="tool_choice")
        grammar = message_grammar(use, self.syntax, {})
        source = _CHECKER.resolve(StructuredOutputs(grammar=grammar)).grammar
        assert source is not None
        self._source = source

    def takes(self, text: str) -> bool:
        matcher = compile_grammar(_TOKENIZER, self._source).matcher
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    def read(self, text: str) -> list[Any]:
        """The arguments of the calls in a text that has nothing else, however it is cut."""
        message = read_message(text, FinishReason.STOP, self.syntax)
        assert message.content is None, text
        reader = MessageReader(self.syntax)
        deltas = [reader.feed(char, None) for char in text] + [reader.feed("", FinishReason.STOP)]
        cut = "".join(call.arguments for delta in deltas for call in delta.tool_calls)
        assert cut == "".join(call.arguments for call in message.tool_calls)
        assert {call.name for call in message.tool_calls} == {"f"}
        return [json.loads(call.arguments) for call in message.tool_calls]

    def sampled(self, chance: random.Random) -> str | None:
        """A text of the grammar, which likes to write the syntax's marks; None if it is long."""
        matcher = compile_grammar(_TOKENIZER, self._source).matcher
        text = bytearray()
        while len(text) < _MOST_BYTES:
            if chance.random() < 0.05 and self.syntax.channels is None:  # those are tokens
                mark = chance.choice(self.syntax.marks).encode()
                text += mark[: matcher.try_consume_tokens(list(mark))]
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(257) if mask[byte >> 3] >> (byte & 7) & 1]
            assert allowed, (bytes(text), self._source)
            if _END in allowed and (len(allowed) == 1 or chance.random() < 0.35):
                return _decoded(text)
            letters = [byte for byte in allowed if byte != _END]
            closers = [byte for byte in letters if byte in b'"}]<']
            plain = [byte for byte in letters if 32 <= byte < 127]
            few = closers if closers and chance.random() < 0.3 else plain or letters
            byte = chance.choice(few if chance.random() < 0.9 else letters)
            text.append(byte)
            assert matcher.consume_token(byte)
        return None


def _decoded(text: bytearray) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:  # half a character
        return None


_NAMES = ("a", "b", "cc", "d_1")
_VALUES = st.sampled_from(
    [
        *("a", "b", "null", "5", "true", 'a"b', "é", "\\n\n", "", " ", "</x>", "[", "{}"),
        *(1, -1, 0, 1.5, True, False, None, [1, "x"], {"k": 1}, {"k l": [None]}, []),
    ]
)


def _of(kind: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=optional)


_SCALARS = st.one_of(
    _of("string"),
    _of("string", minLength=st.integers(0, 2), maxLength=st.integers(2, 5)),
    _of("integer", minimum=st.integers(-9, 9), maximum=st.integers(10, 99)),
    _of("number", minimum=st.sampled_from([0, 0.5]), exclusiveMaximum=st.sampled_from([7.5, 100])),
    _of("boolean"),
    _of("null"),
    st.fixed_dictionaries({"enum": st.lists(_VALUES, min_size=1, max_size=4, unique_by=repr)}),
    st.fixed_dictionaries({"const": _VALUES}),
    st.lists(
        st.sampled_from(["string", "integer", "null", "boolean", "array", "object"]),
        min_size=1,
        max_size=3,
        unique=True,
    ).map(lambda kinds: {"type": kinds}),
    st.sampled_from([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {}]),
)


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(_NAMES), parts, max_size=3),
            "additionalProperties": st.just(False) | parts,
        },
        optional={"required": st.lists(st.sampled_from(_NAMES[:2]), unique=True)},
    ) | st.fixed_dictionaries({"type": st.just("object")}, optional={"additionalProperties": parts})


_SCHEMAS = st.recursive(
    _SCALARS,
    lambda parts: st.one_of(
        _of("array", items=parts, maxItems=st.integers(1, 3)),
        _objects(parts),
        st.fixed_dictionaries({"anyOf": st.lists(parts, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(parts, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"oneOf": st.lists(parts, min_size=1, max_size=3)}),
    ),
    max_leaves=5,
)
_TOOLS = st.one_of(
    _objects(_SCHEMAS),
    st.just({"$ref": "#/$defs/C"}),
    st.just({"allOf": [{"$ref": "#/$defs/C"}, {"type": "object"}]}),
)
_DEFINITIONS = {
    "A": {"anyOf": [{"enum": ["celsius", "kelvin"], "type": "string"}, {"type": "null"}]},
    "B": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/B"}},
        "additionalProperties": False,
    },
    "C": {
        "type": "object",
        "properties": {"zip": {"type": "string"}, "n": {"type": ["integer", "null"]}},
        "required": ["zip"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", _SYNTAXES)
@given(_TOOLS, st.booleans(), st.integers(0, 2**32))
@examples(12)
def test_arguments_satisfy_their_schema(
    name: str, tool: dict[str, Any], is_strict: bool, seed: int
) -> None:
    parameters = {**tool, "$defs": _DEFINITIONS}
    assume(is_strict or "oneOf" not in repr(tool))  # otherwise alternatives may overlap
    try:
        called = Called(name, parameters, is_strict=is_strict)
    except InvalidRequestError:
        assume(False)
    validator = jsonschema_rs.validator_for(parameters)
    for chance in (random.Random(seed), random.Random(seed + 1)):
        text = called.sampled(chance)
        for arguments in called.read(text) if text is not None else ():
            is_finite = "inf" not in repr(arguments)  # JSON's numbers may be too large for Python
            assert not is_finite or validator.is_valid(arguments), (tool, text, arguments)


def _one(schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"u": schema},
        "required": ["u"],
        "additionalProperties": False,
    }


_ENUM_OR_NULL = {"type": ["string", "null"], "enum": ["celsius", "kelvin", None]}
_EITHER = {"anyOf": [{"type": "string", "enum": ["celsius"]}, {"type": "null"}]}
_MAP = {"type": "object", "additionalProperties": {"type": "integer"}}
_REFERENCE = {"$ref": "#/$defs/A", "$defs": {"A": _one({"type": "string"})}}
_ENCODED = {**_one({"$ref": "#/$defs/A%20or%7EB"}), "$defs": {"A or~B": _ENUM_OR_NULL}}
_WITHOUT = {**_one({}), "properties": {"u": {"type": "string"}, "v": False}}
_TREE = {
    "type": "object",
    "properties": {"u": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", _OWN_NOTATION)
@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (_one(_ENUM_OR_NULL), ["celsius", None], ["other", '"celsius"', 5]),
        (_one(_EITHER), ["celsius", None], ["anything at all"]),
        (_one({"enum": [1, "one"]}), [1, "one"], ["two", 2]),
        (_one({"const": {"a": [1], "b c": None}}), [{"a": [1], "b c": None}], [{"a": [2]}, {}]),
        (_one(_MAP), [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
        (_one({"type": ["boolean", "string"]}), [True, "x", "1"], []),
        (_one({"type": ["string", "integer"]}), ["x", "007", 7], []),
        (
            _one({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
            ["x", ["x"], []],
            [[1]],
        ),
        (_one({"type": "integer", "enum": [1.0, 2.0]}), [1, 2], [3]),
        (_one({"allOf": [{"type": "integer"}, {"enum": [1, 2.5]}]}), [1], [2.5]),
        (_one({"enum": ["", "a"], "maxLength": 0}), [""], ["a"]),
        (_REFERENCE, ["12345"], []),
        (_ENCODED, ["celsius", None], ["other"]),
        (_WITHOUT, ["x"], []),
        (_TREE, [[], [{"u": [{}]}]], [[1], [{"u": [{"v": []}]}]]),
    ],
)
def test_schemas_of_every_kind(
    name: str, is_strict: bool, parameters: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    called, syntax = Called(name, parameters, is_strict=is_strict), _SYNTAXES[name]
    for value in right:
        text = written(syntax, ("f", {"u": value}))
        assert called.takes(text), text
        assert called.read(text) == [{"u": value}]
    for value in wrong:
        assert not called.takes(written(syntax, ("f", {"u": value})))


@pytest.mark.parametrize("name", _OWN_NOTATION)
def test_tools_without_named_parameters(name: str) -> None:
    syntax = _SYNTAXES[name]
    closed: list[dict[str, Any]] = [
        {"type": "object", "additionalProperties": False},
        {"properties": {}},
    ]
    for parameters in closed:
        nothing = Called(name, parameters, is_strict=True)
        assert nothing.takes(written(syntax, ("f", {})))
        assert not nothing.takes(written(syntax, ("f", {"u": "x"})))
    numbers = Called(name, _MAP, is_strict=True)
    text = written(syntax, ("f", {"u": 5, "v": 6}))
    assert numbers.takes(text)
    assert numbers.read(text) == [{"u": 5, "v": 6}]
    assert not numbers.takes(written(syntax, ("f", {"u": "x"})))


@pytest.mark.parametrize("name", _OWN_NOTATION)
def test_alternatives_that_overlap_are_refused_if_strict(name: str) -> None:
    overlapping = _one({"oneOf": [{"const": True}, {"type": "boolean"}]})
    assert Called(name, overlapping, is_strict=False).takes(
        written(_SYNTAXES[name], ("f", {"u": True}))
    )
    with pytest.raises(InvalidRequestError):
        Called(name, overlapping, is_strict=True)


@pytest.mark.parametrize("name", _BARE_TEXT)
@pytest.mark.parametrize("value", [["{end}"], {"k": 'a "{end}', "l": "{end}{end}"}])
def test_an_end_tag_within_a_json_string(name: str, value: Any) -> None:
    syntax = _SYNTAXES[name]
    [end] = [mark for mark in syntax.marks if mark.startswith("</") and "param" in mark] or [
        "</arg_value>"
    ]
    called = Called(name, _one({"type": ["array", "object"]}), is_strict=True)
    text = written(syntax, ("f", {"u": value})).replace("{end}", end)
    assert called.takes(text)
    [read] = called.read(text)
    assert json.dumps(read["u"], ensure_ascii=False).replace(end, "{end}") == json.dumps(value)


@pytest.mark.parametrize("name", ["QWEN_CODER", "GLM", "MINIMAX", "DSML"])
def test_a_quote_that_is_left_open_ends_with_its_tag(name: str) -> None:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"u": {"type": "object"}, "v": {"type": "string"}},
    }
    called, syntax = Called(name, parameters, is_strict=False), _SYNTAXES[name]
    text = written(syntax, ("f", {"u": {"size": "5'10@"}, "v": "x"})).replace("@", '"')
    assert called.read(text) == [{"u": '{"size": "5\'10""}', "v": "x"}]
