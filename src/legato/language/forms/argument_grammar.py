"""Grammars of tool calls' arguments, in each notation that models write them in."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from legato.core.errors import InvalidRequestError
from legato.language.forms.escaped_lark import escaped_lark
from legato.language.forms.schema_walk import used_definitions
from legato.language.forms.source import MAX_GRAMMAR_CHARS, guided
from legato.language.message.argument_types import (
    ANNOTATIONS,
    Alternative,
    Alternatives,
    object_parts,
)
from legato.language.message.message_syntax import GEMMA_QUOTE, ArgumentTags, NamedCall
from legato.language.message.tools import CUSTOM_INPUT, ToolFunction

ANY_TEXT = "/(?s:.*)/"


class LarkText:
    """Writes texts as parts of rules.

    Args:
        special: key a special token's text, value its id. Text cannot match a special token.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def literal(self, text: str) -> str:
        """Return a text as literals and the special tokens in it."""
        return " ".join(map(self._piece, self._pieces(text))) or '""'

    def until(self, rule: str, mark: str, text: str = ANY_TEXT, *, without: str = "") -> list[str]:
        """Return the rules for a text, up to a mark and with it.

        Args:
            rule: the first one's name.
            text: a pattern of the text.
            without: what the text must not contain, if the mark alone does not see to that.
        """
        first, *others = self._pieces(mark)
        is_special = first in self._special
        if without == mark and not is_special:  # a text that is lazy ends at the first
            without = ""
        terminal = text if is_special else f"{text} {self._piece(first)}"
        made = []
        if without:
            # The mark may end with this text, which no more of the terminal may follow.
            more = "" if is_special else "(?s:.+)"
            terminal = f"({terminal}) & ~/(?s:.*){_regex(without)}{more}(?s:.*)/"
        if without or (others and not is_special):
            made, terminal = [f"{rule.upper()}: {terminal}"], rule.upper()
        if is_special:
            return [f"{rule}: {terminal} {self.literal(mark)}", *made]
        # A special token in the mark ends the terminal, which then needs not be lazy.
        rest = " ".join(map(self._piece, others))
        return [f"{rule}{'' if others else '[lazy]'}: {terminal} {rest}".rstrip(), *made]

    def _pieces(self, text: str) -> list[str]:
        return list(filter(None, self._names.split(text) if self._names else [text]))

    def _piece(self, piece: str) -> str:
        if piece in self._special:
            return f"<[{self._special[piece]}]>"
        return json.dumps(piece, ensure_ascii=False)


def _regex(text: str) -> str:
    return re.sub(r"[!-/:;=?@\[-^`{-~]", lambda found: f"\\{found[0]}", text)


_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_LENGTHS = ("minLength", "maxLength")
_COUNTS = ("minItems", "maxItems")
_OBJECT_KEYWORDS = ("properties", "required", "additionalProperties")
_MAX_DEPTH = 8
_PYTHON: dict[str, tuple[tuple[str, Any], ...]] = {
    "boolean": (("True", True), ("False", False)),
    "null": (("None", None),),
}
_NUM_KINDS = 6
_UNRESOLVED = {"allOf", "oneOf"}
_ROOT = "."
_REFERENCE = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')
_TO_ROOT = re.compile(r"#(?!/\$defs/|/definitions/)")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_WORD = re.compile(r"\w+")
_FIRST = {"number": "0-9-", "integer": "0-9-", "array": r"\[", "object": r"\{"}
"""Key a JSON type, value a class of the characters that its values begin with."""

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
        self._root: dict[str, Any] = {}
        self._alternatives: Alternatives  # of the schema, unless a call is JSON
        self._num_rules = 0
        self._num_chars = 0  # of the rules
        self._refers_to_root = False  # whether the schema has references but to definitions
        self._shared: dict[str, str] = {}  # key a pattern of text, value its rule
        self._values: dict[int, tuple[str, Any]] = {}  # key a schema's id, value its rule and it
        self._has_gemma = False

    def of(self, function: ToolFunction, *, is_lenient: bool) -> str:
        """Return the right side of a rule for a function's arguments.

        Args:
            is_lenient: enforce the schema as far as possible even if it is not strict.

        Raises:
            InvalidRequestError: the function is strict, and its schema cannot be enforced in this
                notation; or it must be called, and an argument's name cannot be written; or the
                grammar grows too long.
        """
        schema = _ANY_OBJECT
        if function.is_strict or is_lenient:
            schema = function.parameters or _NOTHING
        self._is_strict, self._root = function.is_strict, schema
        self._refers_to_root = _REFERENCE.search(json.dumps(schema)) is not None
        if function.input_grammar is not None:
            return self._input(function.input_grammar)
        if self._form == "json":
            return self._json(schema)
        self._alternatives = Alternatives(schema)
        objects = [one for one in self._alternatives.of(schema) if one.kind == "object"]
        if self._is_strict and (len(objects) != 1 or objects[0].values is not None):
            raise _unenforceable("alternatives of all its arguments")
        return self._one_of(self._arguments(one) for one in objects)

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

    # Objects, whose names and values each notation writes in its own way

    def _arguments(self, schema: Alternative) -> str:
        if isinstance(self._form, ArgumentTags):
            space = self._lark.literal(self._form.space)
            named, other = self._items(schema, _MAX_DEPTH)
            written = (f"({item} {space}){'' if needed else '?'}" for item, needed in named)
            return " ".join([space, *written, f"({other} {space})*" if other else ""])
        begin, end, separator = '"{"', '"}"', ","
        if self._form == "python":
            begin, end, separator = '"("', '")"', ", "
        return f"{begin} {self._separated(schema, _MAX_DEPTH, separator)} {end}"

    def _items(self, schema: Alternative, depth: int) -> tuple[list[Item], str]:
        """Return rules for an object's properties, and one for any other; empty for none."""
        self._check(schema, _OBJECT_KEYWORDS)
        named, others = object_parts(schema.schema)
        if self._form == "gemma":
            named.sort(key=lambda part: part[0])
        items = [
            (self._rule(f"{self._name(name)} {self._value(part, depth)}"), is_required)
            for name, part, is_required in named
            if is_required or part is not False  # which leaves it out
        ]
        if others is False:
            return items, ""
        name = self._other_name([name for name, *_ in named])
        return items, self._rule(f"{name} {self._value(others, depth)}")

    def _separated(self, schema: Alternative, depth: int, separator: str) -> str:
        """Return the rule for properties in their order; optional ones may be left out."""
        items, other = self._items(schema, depth)
        between = _quoted(separator)
        if other:
            items.append((self._rule(f"{other} ({between} {other})*"), False))
        first = rest = '""'
        for item, is_required in reversed(items):
            more = f"{between} {item} {rest}"
            begun = f"{item} {rest}"
            if is_required:
                first, rest = self._rule(begun), self._rule(more)
            else:
                first, rest = self._rule(f"{begun} | {first}"), self._rule(f"{more} | {rest}")
        return first

    def _name(self, name: str) -> str:
        if isinstance(self._form, ArgumentTags):
            return self._lark.literal(self._form.begin + name)
        if self._form == "gemma":
            return self._gemma_key(name)
        if not _IDENTIFIER.fullmatch(name):
            problem = f"{name!r} cannot be the name of an argument: this model calls as Python does"
            raise InvalidRequestError(problem, param="tools")
        return _quoted(f"{name}=")

    def _other_name(self, names: Sequence[str]) -> str:
        """Return the text up to the value of an argument of another name."""
        begin, pattern, end = "", r"/[A-Za-z_][A-Za-z0-9_]*/", '"="'
        if isinstance(self._form, ArgumentTags):
            begin, end = self._lark.literal(self._form.begin), ""
            pattern = r'/[^<>"=\s]([^<>"=\n]*[^<>"=\s])?/'
        elif self._form == "gemma":
            end = '":"'
        if names:
            pattern += f" & ~({' | '.join(map(_quoted, names))})"
        terminal = f"NAME_{self._num_rules}"
        self._num_rules += 1
        self.rules.append(f"{terminal}: {pattern}")
        return f"{begin} {terminal} {end}"

    def _value(self, schema: Any, depth: int) -> str:
        """Return the right side of a rule for the value of an argument, and what precedes it."""
        if self._form == "gemma":
            return self._gemma(schema, depth - 1)
        found = self._alternatives.of(schema)
        return self._tagged(found) if isinstance(self._form, ArgumentTags) else self._python(found)

    # Values in Python: JSON, but for Python's constants

    def _python(self, found: list[Alternative]) -> str:
        constants = [
            _quoted(word)
            for one in found
            for word, value in _PYTHON.get(one.kind, ())
            if one.values is None or value in one.values
        ]
        for one in found:
            if one.kind in _PYTHON and one.schema.keys() & _UNRESOLVED:
                self._check(one)
        others = [one for one in found if one.kind not in _PYTHON]
        return self._one_of([*constants, *([self._json_of(others)] if others else [])])

    # Values in tags

    def _tagged(self, found: list[Alternative]) -> str:
        assert isinstance(self._form, ArgumentTags)
        tags = self._form
        texts = [one for one in found if one.kind == "string"]
        others = [one for one in found if one.kind != "string"]
        bounded = [one.kind for one in others if one.values is None and not one.is_free]
        # A text that begins like a bounded value might be read as a value out of bounds.
        avoided = "" if tags.text_attribute else "".join(_FIRST.get(kind, "") for kind in bounded)
        padding, end = self._lark.literal(tags.padding), self._lark.literal(tags.padding + tags.end)
        forms = [
            self._until(tags.padding + tags.end, self._text(one, avoided), tags.end)
            for one in texts
            if one.values is None
        ]
        listed = [_quoted(text) for one in texts for text in self._held(one, tags.end)]
        forms += [f"{self._one_of(listed)} {end}"] if listed else []
        forms = [f"{self._name_end('true')} {padding} {form}" for form in forms]
        takes_any_text = any(one.kind == "string" and one.is_free for one in texts)
        if others and (not takes_any_text or bounded or tags.text_attribute):
            forms.append(f"{self._name_end('false')} {padding} {self._json_of(others)} {end}")
        return self._one_of(forms)

    def _name_end(self, is_text: str) -> str:
        """Return the text between an argument's name and its value."""
        assert isinstance(self._form, ArgumentTags)
        tags = self._form
        attribute = f"{tags.text_attribute}{is_text}" if tags.text_attribute else ""
        begin = tags.space + tags.value_begin if tags.value_begin else ""
        return self._lark.literal(f"{attribute}{tags.name_end}{begin}")

    # Values in Gemma's notation

    def _gemma(self, schema: Any, depth: int) -> str:
        """Return a rule for a value, made once for each schema, which may refer to itself."""
        found = self._alternatives.of(schema)
        if all(one.is_free for one in found) and len(found) >= _NUM_KINDS:
            return self._any_gemma()
        if not depth:
            if self._is_strict:
                raise _unenforceable(f"arguments nested over {_MAX_DEPTH} deep")
            return self._any_gemma()
        known = self._values.get(id(schema))
        if known is not None:
            return known[0]
        name = f"value_{len(self._values)}"
        self._values[id(schema)] = name, schema
        self.rules.append(f"{name}: {self._one_of(self._gemma_one(one, depth) for one in found)}")
        return name

    def _gemma_one(self, one: Alternative, depth: int) -> str:
        if one.values is not None:
            held = self._held(one, GEMMA_QUOTE) if one.kind == "string" else one.values
            return self._one_of(map(self._gemma_literal, held))
        if one.kind == "string":
            return f"{self._lark.literal(GEMMA_QUOTE)} {self._until(GEMMA_QUOTE, self._text(one))}"
        if one.kind == "array":
            self._check(one, ("items", *_COUNTS))
            items = one.schema.get("items")
            if items is False:
                return '"[]"'
            least, most = (one.schema.get(name) for name in _COUNTS)
            return f'"[" {_several(self._gemma(items, depth - 1), least or 0, most)} "]"'
        if one.kind == "object":
            return f'"{{" {self._separated(one, depth, ",")} "}}"'
        return self._json_of([one])

    def _gemma_key(self, name: str) -> str:
        key = name if _WORD.fullmatch(name) else f"{GEMMA_QUOTE}{name}{GEMMA_QUOTE}"
        return self._lark.literal(f"{key}:")

    def _gemma_literal(self, value: Any) -> str:
        if isinstance(value, list):
            return f'"[" {_joined(map(self._gemma_literal, value))} "]"'
        if isinstance(value, dict):
            keys = sorted(value)
            items = (f"{self._gemma_key(key)} {self._gemma_literal(value[key])}" for key in keys)
            return f'"{{" {_joined(items)} "}}"'
        quote = self._lark.literal(GEMMA_QUOTE)
        return f"{quote} {_quoted(value)} {quote}" if isinstance(value, str) else _json(value)

    def _any_gemma(self) -> str:
        """Return the rule for any value."""
        if not self._has_gemma:
            self._has_gemma = True
            quote, text = self._lark.literal(GEMMA_QUOTE), self._until(GEMMA_QUOTE, ANY_TEXT)
            number = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
            self.rules += [
                f"gemma_any: {quote} {text} | gemma_list | gemma_object | gemma_constant",
                f'gemma_constant: {number} | "true" | "false" | "null"',
                'gemma_list: "[" (gemma_any ("," gemma_any)*)? "]"',
                'gemma_object: "{" (gemma_item ("," gemma_item)*)? "}"',
                'gemma_item: /[A-Za-z0-9_]+/ ":" gemma_any',
            ]
        return "gemma_any"

    # Rules

    def _json_of(self, found: Sequence[Alternative]) -> str:
        """Return a rule for JSON."""
        parts = [
            {**one.schema, "type": one.kind}
            if one.values is None
            else {**one.schema, "enum": one.values}
            for one in found
        ]
        schema = parts[0] if len(parts) == 1 else {"anyOf": parts}
        used = [schema, self._root] if self._refers_to_root else [schema]
        definitions: dict[str, Any] = used_definitions(used, self._root)
        if self._refers_to_root:
            named = {**definitions.get("$defs", {}), _ROOT: self._root}
            schema, definitions = _rebased(schema), _rebased({**definitions, "$defs": named})
        return self._json({**definitions, **schema})

    def _json(self, schema: dict[str, Any]) -> str:
        schema = guided(schema, _JSON_OPTIONS, is_lenient=not self._is_strict)
        return self._rule(f"%json {json.dumps(schema)}")

    def _one_of(self, parts: Iterable[str]) -> str:
        """Raises InvalidRequestError: there are none."""
        different = dict.fromkeys(parts)
        if not different:
            raise InvalidRequestError("no value of an argument satisfies its schema", param="tools")
        return f"({' | '.join(different)})"

    def _rule(self, right: str) -> str:
        """Add a rule; return its name. Raises InvalidRequestError: all together are too long."""
        name = f"a{self._num_rules}"
        self._num_rules += 1
        self._num_chars += len(right)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            problem = f"the grammar of all arguments has over {MAX_GRAMMAR_CHARS} characters"
            raise InvalidRequestError(problem, param="tools")
        self.rules.append(f"{name}: {right}")
        return name

    def _until(self, mark: str, text: str, without: str = "") -> str:
        """Return the rule for a text of a pattern up to a mark, made once."""
        name = self._shared.get(text)
        if name is None:
            name = self._shared[text] = f"text_{len(self._shared)}"
            self.rules += self._lark.until(name, mark, text, without=without)
        return name

    def _text(self, one: Alternative, avoided: str = "") -> str:
        """Return the pattern of a string without escapes.

        Args:
            avoided: characters that it must not begin with.
        """
        self._check(one, _LENGTHS)
        least, most = (one.schema.get(name) for name in _LENGTHS)
        if not avoided:
            has_lengths = least is not None or most is not None
            return f"/(?s:.{_times(least or 0, most)})/" if has_lengths else ANY_TEXT
        if most == 0:
            return "/(?s:.{0})/"
        rest = _times(max((least or 0) - 1, 0), None if most is None else most - 1)
        return rf"/((?s:[^\s{avoided}].{rest})){'' if least else '?'}/"

    def _held(self, one: Alternative, mark: str) -> list[str]:
        """Return the listed strings that the notation can hold."""
        if one.values is None:
            return []
        self._check(one, _LENGTHS)
        least, most = (one.schema.get(name) for name in _LENGTHS)
        held = [text for text in one.values if mark not in text]
        if self._is_strict and len(held) < len(one.values):
            raise _unenforceable(f"a string with {mark!r}")
        longest = max(map(len, held), default=0) if most is None else most
        return [text for text in held if (least or 0) <= len(text) <= longest]

    def _check(self, one: Alternative, known: Iterable[str] = ()) -> None:
        """Raise if a strict function's schema says more than its notation can hold."""
        more = sorted(one.schema.keys() - ANNOTATIONS - set(known))
        if self._is_strict and more:
            raise _unenforceable(repr(more[0]))


def _several(item: str, least: int, most: int | None) -> str:
    """Return the right side of a rule for a number of items with commas."""
    if most == 0:
        return '""'
    more = f'{item} ("," {item}){_times(max(least - 1, 0), None if most is None else most - 1)}'
    return more if least else f"({more})?"


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _joined(parts: Iterable[str]) -> str:
    return ' "," '.join(parts)


def _rebased(value: Any) -> Any:
    """Return a schema with its references to the root turned to the definition of the root."""
    if isinstance(value, list):
        return list(map(_rebased, value))
    if not isinstance(value, dict):
        return value
    made = {key: _rebased(inner) for key, inner in value.items()}
    place = made.get("$ref")
    if isinstance(place, str) and _TO_ROOT.match(place):
        made["$ref"] = f"#/$defs/{_ROOT}{place[1:]}"
    return made


def _json(value: Any) -> str:
    return _quoted(json.dumps(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unenforceable(what: str) -> InvalidRequestError:
    problem = f"a strict function cannot have {what}: this model does not write arguments as JSON"
    return InvalidRequestError(problem, param="tools")
