"""Checks that a form of output can be satisfied, before a request reaches an engine."""

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
from llguidance import LLTokenizer

from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams
from legato.core.structured_outputs import StructuredOutputs
from legato.core.vocabulary import Vocabulary
from legato.core.worker import Worker
from legato.grammar.matcher import CHECK_STACK_BYTES, GrammarError, compile_grammar
from legato.grammar.tokens import small_tokenizer, special_token_texts
from legato.language.forms.schema_walk import faulty_place, schemas_within
from legato.language.forms.source import grammar_source, parse_json

_LINE = re.compile(r"at (\d+)\((\d+)\): ")
_SCHEMA = "failed to compile JSON schema: "
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_CAUSE = re.compile(r"^error: (.+)", re.MULTILINE)
_EXPLAINED = (("NoExtension", "no output at all satisfies it"),)
"""Key the start of llguidance's error, value its meaning."""

_CONTROL_CHARS = 0x20
"""Characters below this are escaped in JSON; every vocabulary has tokens for escapes."""


class GrammarChecker:
    """Compiles forms as an engine would.

    A form may take time and memory up to the limits of `compile_grammar`.

    Args:
        vocabulary: called when the first form is checked.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._worker = Worker("checks", stack_bytes=CHECK_STACK_BYTES)

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with their form of output, if any, as `resolve` returns it."""
        if params.structured_outputs is None:
            return params
        form = self.resolve(params.structured_outputs)
        return msgspec.structs.replace(params, structured_outputs=form)

    def resolve(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """Return the form as a grammar that compiles.

        Raises:
            InvalidRequestError: the form cannot be satisfied. `param` names the field, and the
                message says where in the field.
        """
        source = grammar_source(outputs, self._special_tokens)
        self._check_spelling(outputs)
        try:
            self._compile(source)
        except GrammarError as error:
            raise self._blaming(outputs, str(error)) from error
        return StructuredOutputs(grammar=source)

    def check_part(self, outputs: StructuredOutputs) -> None:
        """Check of a form what does not show when it becomes a part of a grammar that compiles.

        A schema that cannot be met fails wherever it stands; a pattern or a choice alone only.

        Raises:
            InvalidRequestError: as `resolve`.
        """
        if outputs.form in ("json", "json_object"):
            self._check_spelling(outputs)
        else:
            self.resolve(outputs)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return small_tokenizer(self._vocabulary())

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        return missing_bytes(self._vocabulary())

    @cached_property
    def _special_tokens(self) -> list[str]:
        return special_token_texts(self._vocabulary())

    def _check_spelling(self, outputs: StructuredOutputs) -> None:
        if not isinstance(outputs.json, str):
            return
        found = unspelled(parse_json(outputs.json, "json"), self._missing_bytes)
        if found is not None:
            place, text = found
            message = f"the model has no tokens for {text!r}, at {place} of the schema"
            raise InvalidRequestError(message, param="structured_outputs.json")

    def _compile(self, source: str) -> None:
        """Compile up to the first token, on a stack many times smaller than an engine's."""
        self._worker.submit(self._try, source).result()

    def _try(self, source: str) -> None:
        matcher = compile_grammar(self._tokenizer, source).matcher
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(matcher.get_error())

    def _blaming(self, outputs: StructuredOutputs, error: str) -> InvalidRequestError:
        told, param = _told(error), f"structured_outputs.{outputs.form}"
        if outputs.form == "json":
            assert isinstance(outputs.json, str), "kept as text"
            place = f", at {self._place(parse_json(outputs.json, 'json'), told)} of the schema"
        else:
            line = _LINE.match(error) if outputs.form == "grammar" else None
            place = f", at line {line[1]}, column {line[2]}" if line else ""
        message = f"the form of the output cannot be met: {told}{place}"
        return InvalidRequestError(message, param=param)

    def _place(self, schema: Any, told: str) -> str:
        def is_faulty(inner: dict[str, Any]) -> bool:
            try:
                self._compile(grammar_source(StructuredOutputs(json=inner), ()))
            except (GrammarError, InvalidRequestError) as error:
                return _told(str(error)) == told
            return False

        return faulty_place(schema, is_faulty) if isinstance(schema, dict) else "#"


def _told(error: str) -> str:
    """Shorten llguidance's error, without positions in a text that the client has not seen."""
    for said, meaning in _EXPLAINED:
        if error.startswith(said):
            return meaning
    text = _EXCERPT.sub("", _LINE.sub("", error, count=1)).removeprefix(_SCHEMA)
    cause = _CAUSE.search(text)
    first, *_ = text.splitlines() or [""]
    return f"{first} {cause[1]}" if cause else first.replace("Unimplemented keys", "not supported")


def missing_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """Return the bytes, of all that JSON writes unescaped, that no token has; takes ten ms."""
    return frozenset(range(_CONTROL_CHARS, 256)).difference(vocabulary.text)


def unspelled(schema: Any, missing: frozenset[int]) -> tuple[str, str] | None:
    """Return the first constant or property name with a byte that no token has.

    An output could begin with the bytes before it, and would have no way to go on.

    Args:
        missing: bytes that no token has.

    Returns:
        JSON pointer of the schema with the text, and the text; None without one.
    """
    try:
        return _found(schema, missing, "#") if missing and isinstance(schema, dict) else None
    except RecursionError:  # too deep: the compiler reports that
        return None


def _found(schema: dict[str, Any], missing: frozenset[int], place: str) -> tuple[str, str] | None:
    for text in _texts([schema.get("const"), schema.get("enum"), list(_names(schema))]):
        if not missing.isdisjoint(text.encode()):
            return place, text
    inner = (_found(part, missing, f"{place}{step}") for step, part in schemas_within(schema))
    return next(filter(None, inner), None)


def _names(schema: dict[str, Any]) -> Any:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else ()


def _texts(value: Any) -> list[str]:
    """Return all strings in a JSON value, names included."""
    texts, left = [], [value]
    while left:
        match left.pop():
            case str(text):
                texts.append(text)
            case list(parts):
                left += parts
            case dict(named):
                left += [*named, *named.values()]
    return texts
