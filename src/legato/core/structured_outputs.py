"""The form that an output must have. Names and meanings are vLLM's."""

from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.errors import InvalidRequestError

MAX_CHOICES = 2**12
"""Entries of `choice`."""

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of a whole output; exactly one of the first six fields is set.

    Its compilation finds out whether the form can be met at all.

    Attributes:
        json: a JSON schema, given as a dict or as text; kept as text.
        regex: a pattern of the whole output, in the syntax of Rust's `regex`.
        choice: texts; the output is one of them. Kept as a tuple.
        grammar: a Lark grammar, in llguidance's dialect, whose rule `start` is the output; or
            llama.cpp's GBNF, with `root`.
        json_object: any JSON object; True if set.
        structural_tag: text that is free except inside its tags, in either of vLLM's forms, given
            as a dict or as text; kept as text.
        disable_any_whitespace: JSON comes without whitespace between its values.
        whitespace_pattern: regex of the whitespace between the values of JSON; None is up to twenty
            blanks, tabs and line breaks.

    Raises:
        InvalidRequestError: no form is set, or more than one, or a form is empty.
            `param` names the field, as "structured_outputs.regex".
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            several = f", got {' and '.join(given)}" if given else ""
            raise InvalidRequestError(
                f"structured_outputs takes exactly one of {', '.join(_FORMS)}{several}",
                param="structured_outputs",
            )
        for name in ("json", "structural_tag"):
            self._keep(name, _as_text(getattr(self, name), name))
        if self.choice is not None:
            self._keep("choice", _as_choices(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None:
                _require(bool(text), name, "must not be empty")

    @property
    def form(self) -> str:
        """Name of the form that is set."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))

    def _keep(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)


def _as_text(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(name, f"cannot be written as JSON: {error}") from error


def _as_choices(choice: Sequence[str]) -> tuple[str, ...]:
    _require(not isinstance(choice, str) and bool(choice), "choice", "must be a list of texts")
    _require(len(choice) <= MAX_CHOICES, "choice", f"has over {MAX_CHOICES} entries")
    _require(all(isinstance(text, str) and text for text in choice), "choice", "has an empty text")
    return tuple(choice)


def _require(condition: bool, name: str, rule: str) -> None:
    if not condition:
        raise _invalid(name, rule)


def _invalid(name: str, rule: str) -> InvalidRequestError:
    param = f"structured_outputs.{name}"
    return InvalidRequestError(f"{param} {rule}", param=param)
