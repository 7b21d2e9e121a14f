"""What clients may take up, told by the flags and by the constants that bound it."""

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

from legato.api import limits
from legato.api.config import ServerConfig
from legato.core import sampling_params, slo
from legato.core.config_fields import fields_of, written
from scripts.api_reference import words
from scripts.api_reference.markdown import clause, code, items

_MODULES = (sampling_params, slo, limits)
GROUP = "limits on clients"
"""Heading of the flags that this page describes."""
OF_TYPES = frozenset(
    (
        *("MAX_LOGPROBS", "MAX_LOGPROB_TOKEN_IDS", "MAX_LOGIT_BIAS", "MAX_STOP", "MAX_N"),
        *("MAX_ALLOWED_TOKEN_IDS", "MAX_BAD_WORDS", "MAX_REPETITION_PENALTY", "MAX_PRIORITY"),
        *("MAX_CACHE_SALT", "MAX_MESSAGES", "MAX_ROLE_CHARS", "MAX_CONTENT_PARTS", "MAX_TOOLS"),
        *("MAX_TOOL_NAME_CHARS", "MAX_TOOL_CALLS", "MAX_TEMPLATE_CHARS", "MAX_TEMPLATE_VARIABLES"),
        *("MAX_DETOKENIZED", "SEED_LIMIT", "TOP_K_LIMIT"),
    )
)
"""Constants that the HTTP reference shows in the types of fields."""
_MOST_SPELLED = 2**31 - 1
"""Beyond it, a value is told as the code has it."""


def parts() -> Mapping[str, Callable[[], str]]:
    """Key a part of the page."""
    return {"limits-by-flags": _by_flags, "limits-of-requests": _of_requests}


def constants() -> dict[str, tuple[str, str]]:
    """The numbers that bound requests; key the name, value the number and what it is of.

    Raises:
        ValueError: one is not described.
    """
    return {name: told for module in _MODULES for name, told in _constants(module)}


def _by_flags() -> str:
    """Return the flags with their defaults, meanings and what happens beyond."""
    alike: dict[tuple[str, str], list[str]] = {}  # key meaning and consequence
    for field in fields_of(ServerConfig):
        if field.group == GROUP:
            default = field.flag.default or written(field.kind, field.default)
            flag = f"{code(field.option)} ({default})"
            alike.setdefault((field.flag.help, words.BEYOND[field.name]), []).append(flag)
    return items(
        (", ".join(flags), f"{meaning}; beyond it, {beyond}")
        for (meaning, beyond), flags in alike.items()
    )


def _of_requests() -> str:
    return items(
        (f"{code(name)} ({number})", clause(of))
        for name, (number, of) in constants().items()
        if name not in OF_TYPES
    )


def _constants(module: ModuleType) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the constants of a module, each with the words in the line below it."""
    statements = ast.parse(inspect.getsource(module)).body
    for statement, below in itertools.pairwise(statements):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                number = getattr(module, name)
                if name.startswith("_") or not isinstance(number, int | float):
                    continue
                match below:
                    case ast.Expr(value=ast.Constant(value=str(of))):
                        yield name, (_number(name, number, value), of)
                    case _:
                        raise ValueError(f"{module.__name__}.{name} is not described")


def _number(name: str, number: float, source: ast.expr) -> str:
    if name.endswith("_BYTES"):
        return written("size", number)
    if number > _MOST_SPELLED:
        return ast.unparse(source)
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
