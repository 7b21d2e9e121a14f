"""Grammars for vLLM's structural tags, old form and new: free text except inside tags."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from llguidance import regex_to_lark

from legato.core.errors import InvalidRequestError

_PARAM = "structured_outputs.structural_tag"
_TEXT = r"TEXT: /(.|\n)*/"
_MAX_RULES = 4096
_MAX_DEPTH = 64
_JSON_TYPES = {str: "a text", list: "a list", dict: "an object"}

_Value = TypeVar("_Value", str, list[Any], dict[str, Any])


def structural_tag_source(
    tag: Any, options: str, special_tokens: Iterable[str], json_rule: Callable[[Any], str]
) -> str:
    """Return the grammar of a structural tag.

    Args:
        tag: {"type": "structural_tag"} with "structures" and "triggers", or with a "format".
        options: a line of Lark.
        special_tokens: texts that mean tokens at the beginning or end of a tag.
        json_rule: returns the right side of a rule for JSON by a schema.

    Raises:
        InvalidRequestError: the tag is malformed, or has a part that Legato does not support.
    """
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise _invalid('must be an object of "type": "structural_tag"')
    form = _new_form(tag) if "structures" in tag else _field(tag, "format", dict, "")
    return _Writer(special_tokens, json_rule).source(form, options)


def _new_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the old form to the new one."""
    tags = [
        {
            "begin": _field(structure, "begin", str, f".structures[{i}]"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
            "end": _field(structure, "end", str, f".structures[{i}]"),
        }
        for i, structure in enumerate(_field(tag, "structures", list, ""))
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes a Lark rule for each part."""

    def __init__(self, special_tokens: Iterable[str], json_rule: Callable[[Any], str]) -> None:
        names = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._json_rule = json_rule
        self._rules: list[str] = []
        self._grammars: list[str] = []
        self._depth = 0

    def source(self, form: Any, options: str) -> str:
        start = self._part(form, ".format", "")
        lark = "\n".join([f"start: {start}", *self._rules, _TEXT, options, ""])
        if not self._grammars:
            return lark
        named = [{"name": f"g{i}", "lark_grammar": text} for i, text in enumerate(self._grammars)]
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *named]})

    def _part(self, part: Any, place: str, end: str | None) -> str:
        """Return the name of a rule for a part and the text after it.

        Args:
            end: the text after the part, at which free text ends; "" if nothing follows, None if
                the caller writes the following text itself.
        """
        kind = _field(part, "type", str, place)
        write = getattr(self, f"_write_{kind}", None)
        if write is None:
            raise _invalid(f"{place}.type {kind!r} is not supported")
        self._depth += 1
        if self._depth > _MAX_DEPTH or len(self._rules) > _MAX_RULES:
            raise _invalid(f"{place} is nested too deeply, or there are too many parts")
        right: str = write(part, place, end)
        self._depth -= 1
        return self._rule(right)

    def _rule(self, right: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {right}")
        return name

    def _write_const_string(self, part: Any, place: str, end: str | None) -> str:
        return self._literal(_field(part, "value", str, place) + (end or ""))

    def _write_json_schema(self, part: Any, place: str, end: str | None) -> str:
        if "json_schema" not in part:
            raise _invalid(f"{place}.json_schema is missing")
        return f"{self._json_rule(part['json_schema'])} {self._literal(end)}"

    def _write_regex(self, part: Any, place: str, end: str | None) -> str:
        return f"/{regex_to_lark(_field(part, 'pattern', str, place), 'd')}/ {self._literal(end)}"

    def _write_grammar(self, part: Any, place: str, end: str | None) -> str:
        self._grammars.append(_field(part, "grammar", str, place))
        return f"@g{len(self._grammars) - 1} {self._literal(end)}"

    def _write_any_text(self, _: Any, place: str, end: str | None) -> str:
        return self._free_text(place, end)

    def _write_sequence(self, part: Any, place: str, end: str | None) -> str:
        *first, last = self._entries(part, "elements", place)
        rules = [self._part(element, where, None) for element, where in first]
        return " ".join([*rules, self._part(*last, end)])

    def _write_or(self, part: Any, place: str, end: str | None) -> str:
        entries = self._entries(part, "elements", place)
        return " | ".join(self._part(element, where, end) for element, where in entries)

    def _write_tag(self, part: Any, place: str, end: str | None) -> str:
        return f"{self._literal(_field(part, 'begin', str, place))} {self._body(part, place, end)}"

    def _write_tags_with_separator(self, part: Any, place: str, end: str | None) -> str:
        entries = self._entries(part, "tags", place)
        tag = self._rule(" | ".join(self._write_tag(*entry, None) for entry in entries))
        separator = self._literal(_field(part, "separator", str, place))
        more = "" if part.get("stop_after_first") else f"({separator} {tag})*"
        several = f"{tag} {more}"
        return f"{several if part.get('at_least_one') else f'({several})?'} {self._literal(end)}"

    def _write_triggered_tags(self, part: Any, place: str, end: str | None) -> str:
        triggers = _field(part, "triggers", list, place)
        entries = self._entries(part, "tags", place)
        tag = self._rule(" | ".join(self._triggered(*entry, triggers) for entry in entries))
        if part.get("stop_after_first"):
            closed = f"{tag} {self._literal(end)}"
            is_optional = not part.get("at_least_one")
            return f"{closed} | {self._free_text(place, end)}" if is_optional else closed
        repeated = "+" if part.get("at_least_one") else "*"
        return f"{tag}{repeated} {self._free_text(place, end)}"

    def _triggered(self, tag: Any, place: str, triggers: list[Any]) -> str:
        """Return the free text before a tag, and the tag, which starts with one of the triggers."""
        begin = _field(tag, "begin", str, place)
        trigger = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
        if not trigger:
            raise _invalid(f"{place}.begin {begin!r} begins with none of the triggers")
        rest = f"{self._literal(begin[len(trigger) :])} {self._body(tag, place, None)}"
        if self._special.match(trigger):
            return f"TEXT {self._literal(trigger)} {rest}"
        return f"{self._rule(f'TEXT {json.dumps(trigger)}', '[lazy]')} {rest}"

    def _body(self, tag: Any, place: str, end: str | None) -> str:
        content = _field(tag, "content", dict, place)
        return self._part(content, f"{place}.content", _field(tag, "end", str, place) + (end or ""))

    def _free_text(self, place: str, end: str | None) -> str:
        if end is None:
            raise _invalid(f"{place}: text that is free ends only with a tag, or is the last")
        if not end:
            return "TEXT"
        special = self._special.search(end)
        plain = end[: special.start()] if special else end
        text = self._rule("TEXT", f"[suffix={json.dumps(plain)}]") if plain else "TEXT"
        return f"{text} {self._literal(end[len(plain) :])}"

    def _literal(self, text: str | None) -> str:
        """Return a text as literals and the special tokens in it."""
        pieces, at = [], 0
        for found in self._special.finditer(text or ""):
            pieces += [json.dumps((text or "")[at : found.start()]), found[0]]
            at = found.end()
        pieces.append(json.dumps((text or "")[at:]))
        return " ".join(piece for piece in pieces if piece != '""') or '""'

    def _entries(self, part: Any, name: str, place: str) -> list[tuple[Any, str]]:
        """Return the entries of a list with their places."""
        entries = _field(part, name, list, place)
        if not entries:
            raise _invalid(f"{place}.{name} is empty")
        return [(entry, f"{place}.{name}[{i}]") for i, entry in enumerate(entries)]


def _field(part: Any, name: str, kind: type[_Value], place: str) -> _Value:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, kind):
        raise _invalid(f"{place}.{name} must be {_JSON_TYPES[kind]}")
    return value


def _invalid(rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_PARAM}{'' if rule[0] == '.' else ' '}{rule}", param=_PARAM)
