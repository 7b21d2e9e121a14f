"""Grammars of tool calls' arguments, in each notation that models write them in."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from legato.core.errors import InvalidRequestError
from legato.grammar.escaped_lark import escaped_lark
from legato.grammar.json_schema import guided
from legato.server.requests.lark_text import ANY_TEXT, LarkText
from legato.server.requests.tools import CUSTOM_INPUT, FunctionDefinition
from legato.text.argument_types import resolved, schema_types
from legato.text.message_syntax import GEMMA_QUOTE, ArgumentTags, NamedCall

_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_DEFINITIONS = ("$defs", "definitions")
_LENGTHS = ("minLength", "maxLength")
_MAX_DEPTH = 8
_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_WORD = re.compile(r"\w+")
_KNOWN_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "nullable"),
        *("title", "description", "default", "examples", "additionalProperties", "$ref"),
        *_DEFINITIONS,
    }
)
"""Keywords that notations other than JSON enforce, or that allow no less without them."""

Item = tuple[str, bool]
"""The right side of a rule for one argument, and whether it is required."""


class ArgumentGrammar:
    """Makes the rules of the arguments of some calls in one notation.

    Attributes:
        rules: all rules made so far.

    Args:
        call: how a call is written; None if it is JSON.
    """

    def __init__(self, call: NamedCall | None, lark: LarkText) -> None:
        self.rules: list[str] = []
        self._form = "json" if call is None else call.arguments
        self._lark = lark
        self._is_strict = False
        self._num_rules = 0
        self._shared: dict[str, str] = {}  # key a pattern of text, value its rule
        self._has_gemma = False

    def of(self, function: FunctionDefinition, *, is_lenient: bool) -> str:
        """Return the right side of a rule for a function's arguments.

        Args:
            is_lenient: enforce the schema as far as possible even if it is not strict.

        Raises:
            InvalidRequestError: the function is strict, and its schema cannot be enforced in this
                notation; or it must be called, and an argument's name cannot be written.
        """
        schema = _ANY_OBJECT
        if function.strict or is_lenient:
            schema = function.parameters or _NOTHING
        self._is_strict = function.strict
        if function.input_grammar is not None:
            return self._input(function.input_grammar)
        if self._form == "json":
            return self._json(schema, schema)
        if not _has_arguments(resolved(schema, schema)):
            if self._is_strict and schema is not _ANY_OBJECT and _composed(schema):
                raise _unenforceable("a schema without properties")
            return self._any_arguments()
        return self._arguments(schema)

    def _input(self, grammar: str) -> str:
        """Return the right side of a rule for the input of a custom tool, its only argument."""
        if isinstance(self._form, ArgumentTags):
            tags = self._form
            text = f"{self._lark.literal(tags.padding)} {self._nested(grammar)}"
            name = f"{self._lark.literal(tags.begin + CUSTOM_INPUT)} {self._name_end('true')}"
            space = self._lark.literal(tags.space)
            return f"{space} {name} {text} {self._lark.literal(tags.padding + tags.end)} {space}"
        if self._form == "gemma":
            quote = self._lark.literal(GEMMA_QUOTE)
            return f'"{{{CUSTOM_INPUT}:" {quote} {self._nested(grammar)} {quote} "}}"'
        begin, end = (f'{{"{CUSTOM_INPUT}": "', '"}')
        if self._form != "json":
            begin, end = (f'({CUSTOM_INPUT}="', '")')
        return f"{_quoted(begin)} {self._nested(escaped_lark(grammar))} {_quoted(end)}"

    def _nested(self, grammar: str) -> str:
        """Return the name of a rule that is a grammar of its own."""
        return self._rule(f"%lark {{\n{grammar}\n}}")

    def _arguments(self, root: dict[str, Any]) -> str:
        schema = resolved(root, root)
        items = [
            (self._argument(name, part, root), is_required)
            for name, part, is_required in _properties(schema, is_sorted=self._form == "gemma")
        ]
        if isinstance(self._form, ArgumentTags):
            space = self._lark.literal(self._form.space)
            written = (f"({item} {space}){'' if needed else '?'}" for item, needed in items)
            return " ".join([space, *written])
        begin, end = ("{", "}") if self._form == "gemma" else ("(", ")")
        separator = "," if self._form == "gemma" else ", "
        return f'"{begin}" {self._separated(items, separator)} "{end}"'

    def _any_arguments(self) -> str:
        if isinstance(self._form, ArgumentTags):
            tags, space = self._form, self._lark.literal(self._form.space)
            name = f'{self._lark.literal(tags.begin)} /[^<>"=\\n]+/'
            ends = self._one_of(map(self._name_end, ("true", "false")))
            return f"{space} ({name} {ends} {self._tagged_text(ANY_TEXT)} {space})*"
        if self._form == "gemma":
            return self._any_gemma("object")
        value = self._json({}, {})
        item = self._rule(f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {value}')
        return f'"(" ({item} (", " {item})*)? ")"'

    def _argument(self, name: str, part: Any, root: dict[str, Any]) -> str:
        """Return the name of a rule for one argument."""
        if isinstance(self._form, ArgumentTags):
            return self._rule(self._tagged(self._form, name, part, root))
        if self._form == "gemma":
            return self._rule(f"{self._gemma_key(name)} {self._gemma(part, root, _MAX_DEPTH)}")
        if not _IDENTIFIER.fullmatch(name):
            problem = f"{name!r} cannot be the name of an argument: this model calls as Python does"
            raise InvalidRequestError(problem, param="tools")
        return self._rule(f"{_quoted(f'{name}=')} {self._python(part, root)}")

    # In Python

    def _python(self, schema: Any, root: dict[str, Any]) -> str:
        """Return the right side of a rule for a value: JSON, but for Python's constants."""
        schema = resolved(schema, root)
        has_types = isinstance(schema, dict) and "type" in schema and not _values(schema, root)
        if not has_types:
            return self._json(schema, root)
        types = schema_types({"type": schema["type"]}, root)
        return self._one_of(
            _PYTHON.get(name) or self._json({**schema, "type": name}, root) for name in types
        )

    # In tags

    def _tagged(self, tags: ArgumentTags, name: str, part: Any, root: dict[str, Any]) -> str:
        values, types = _values(part, root), schema_types(part, root)
        are_texts = bool(values) and all(isinstance(value, str) for value in values)
        may_be_text = not values and (not types or "string" in types)
        may_be_json = not are_texts and types != ("string",)
        forms = []
        if may_be_text:
            forms.append(f"{self._name_end('true')} {self._tagged_text(self._text(part, root))}")
        if are_texts or (may_be_json and (tags.text_attribute or not may_be_text)):
            value = self._one_of(map(_quoted, values)) if are_texts else self._json(part, root)
            padding = self._lark.literal(tags.padding)
            end = self._lark.literal(tags.padding + tags.end)
            name_end = self._name_end("true" if are_texts else "false")
            forms.append(f"{name_end} {padding} {value} {end}")
        return f"{self._lark.literal(tags.begin + name)} {self._one_of(forms)}"

    def _name_end(self, is_text: str) -> str:
        """Return the text between an argument's name and its value."""
        assert isinstance(self._form, ArgumentTags)
        tags = self._form
        attribute = f"{tags.text_attribute}{is_text}" if tags.text_attribute else ""
        begin = tags.space + tags.value_begin if tags.value_begin else ""
        return self._lark.literal(f"{attribute}{tags.name_end}{begin}")

    def _tagged_text(self, text: str) -> str:
        """Return the right side of a rule for a value of a pattern, with the tag after it."""
        assert isinstance(self._form, ArgumentTags)
        padding = self._form.padding
        return f"{self._lark.literal(padding)} {self._until(padding + self._form.end, text)}"

    # In Gemma's notation

    def _gemma(self, schema: Any, root: dict[str, Any], depth: int) -> str:
        """Return the right side of a rule for a value."""
        schema = resolved(schema, root)
        if not isinstance(schema, dict) or not depth:
            return self._any_gemma("value")
        values = _values(schema, root)
        if values:
            return self._one_of(map(self._gemma_literal, values))
        parts = schema.get("anyOf") or schema.get("oneOf")
        if parts:
            return self._one_of(self._gemma(part, root, depth - 1) for part in parts)
        types = schema_types(schema, root)
        if not types:
            return self._any_gemma("value")
        return self._one_of(self._gemma_type(name, schema, root, depth) for name in types)

    def _gemma_type(
        self, name: str, schema: dict[str, Any], root: dict[str, Any], depth: int
    ) -> str:
        if name == "string":
            return self._gemma_text(self._text(schema, root))
        if name == "array":
            self._check(schema)
            item = self._rule(self._gemma(schema.get("items"), root, depth - 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if name == "object":
            if not _has_arguments(schema):
                return self._any_gemma("object")
            items = [
                (f"{self._gemma_key(key)} {self._gemma(part, root, depth - 1)}", is_required)
                for key, part, is_required in _properties(schema, is_sorted=True)
            ]
            named = [(self._rule(item), is_required) for item, is_required in items]
            return f'"{{" {self._separated(named, ",")} "}}"'
        return self._json({**schema, "type": name}, root)

    def _gemma_key(self, name: str) -> str:
        key = name if _WORD.fullmatch(name) else f"{GEMMA_QUOTE}{name}{GEMMA_QUOTE}"
        return self._lark.literal(f"{key}:")

    def _gemma_literal(self, value: Any) -> str:
        is_text = isinstance(value, str)
        text = f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if is_text else json.dumps(value)
        return self._lark.literal(text)

    def _gemma_text(self, text: str = ANY_TEXT) -> str:
        return f"{self._lark.literal(GEMMA_QUOTE)} {self._until(GEMMA_QUOTE, text)}"

    def _any_gemma(self, kind: str) -> str:
        """Return the rule for any value, or for any object."""
        if not self._has_gemma:
            self._has_gemma = True
            scalar = '/-?(0|[1-9][0-9]*)(\\.[0-9]+)?/ | "true" | "false" | "null"'
            self.rules += [
                f"gemma_value: {self._gemma_text()} | gemma_list | gemma_object | {scalar}",
                'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
                'gemma_object: "{" (gemma_item ("," gemma_item)*)? "}"',
                'gemma_item: /[A-Za-z0-9_]+/ ":" gemma_value',
            ]
        return f"gemma_{kind}"

    # Rules

    def _json(self, schema: Any, root: dict[str, Any]) -> str:
        schema = resolved(schema, root)
        if isinstance(schema, dict) and schema is not root:
            schema = {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}
        schema = schema if isinstance(schema, dict) else {}
        schema = guided(schema, _JSON_OPTIONS, is_lenient=not self._is_strict)
        return self._rule(f"%json {json.dumps(schema)}")

    def _separated(self, items: Sequence[Item], separator: str) -> str:
        """Return the rule for items in their order; optional ones may be left out."""
        between = _quoted(separator)
        first = rest = '""'
        for item, is_required in reversed(items):
            more = f"{between} {item} {rest}"
            begun = f"{item} {rest}"
            if is_required:
                first, rest = self._rule(begun), self._rule(more)
            else:
                first, rest = self._rule(f"{begun} | {first}"), self._rule(f"{more} | {rest}")
        return first

    def _one_of(self, parts: Iterable[str]) -> str:
        return f"({' | '.join(dict.fromkeys(parts))})"

    def _rule(self, right: str) -> str:
        """Add a rule; return its name."""
        name = f"a{self._num_rules}"
        self._num_rules += 1
        self.rules.append(f"{name}: {right}")
        return name

    def _until(self, mark: str, text: str) -> str:
        """Return the rule for a text of a pattern up to a mark, made once."""
        name = self._shared.get(text)
        if name is None:
            name = self._shared[text] = f"text_{len(self._shared)}"
            self.rules += self._lark.until(name, mark, text)
        return name

    def _text(self, schema: Any, root: dict[str, Any]) -> str:
        """Return the pattern of a string without escapes."""
        schema = resolved(schema, root)
        if not isinstance(schema, dict):
            return ANY_TEXT
        self._check(schema, _LENGTHS)
        least, most = (schema.get(name) for name in _LENGTHS)
        if least is None and most is None:
            return ANY_TEXT
        return f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"

    def _check(self, schema: dict[str, Any], known: Iterable[str] = ()) -> None:
        """Raise if a strict function's schema says more than its notation can hold."""
        more = sorted(set(schema).difference(_KNOWN_KEYWORDS, known))
        if self._is_strict and more:
            raise _unenforceable(repr(more[0]))


def _properties(schema: dict[str, Any], *, is_sorted: bool) -> list[tuple[str, Any, bool]]:
    """Return names, schemas and whether they are required."""
    required = schema.get("required") or []
    properties = {**(schema.get("properties") or {})}
    for name in required:
        properties.setdefault(name, {})
    names = sorted(properties) if is_sorted else list(properties)
    return [(name, properties[name], name in required) for name in names]


def _has_arguments(schema: Any) -> bool:
    return isinstance(schema, dict) and ("properties" in schema or bool(schema.get("required")))


def _composed(schema: dict[str, Any]) -> bool:
    return bool(set(schema) - _KNOWN_KEYWORDS) or "anyOf" in schema or "oneOf" in schema


def _values(schema: Any, root: dict[str, Any]) -> list[Any]:
    """Return the only values that a schema allows; none if it lists none."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return []
    return list(schema.get("enum") or ([schema["const"]] if "const" in schema else []))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unenforceable(what: str) -> InvalidRequestError:
    problem = f"a strict function cannot have {what}: this model does not write arguments as JSON"
    return InvalidRequestError(problem, param="tools")
