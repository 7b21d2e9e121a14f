"""Fields of configurations, each written once: its name, type, default and description.

The flags of the command line, the keywords of `LLM` and the command lines that the tuner prints are
all made of `fields_of`.
"""

import functools
import math
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from legato.core.errors import ConfigError

Kind = Literal[
    "switch",
    "choice",
    "count",
    "number",
    "duration",
    "size",
    "text",
    "texts",
    "names",
    "classes",
    "weights",
    "count_or_word",
    "slack",
]
"""How a value is written on a command line: "texts" with commas, "names" with spaces between them;
"classes" are `SloClass`es, "weights" numbers, by name; "count_or_word" is a number or one of the
field's choices; "slack" is a percentage, or "unbounded" for infinity.
"""

_BY_TYPE: dict[Any, Kind] = {
    bool: "switch",
    str: "text",
    Literal: "choice",
    tuple: "texts",
    dict: "classes",
}
_BY_UNIT: dict[str, Kind] = {"_s": "duration", "_bytes": "size"}  # key the name's suffix
_BY_END: dict[str, Kind] = {**_BY_UNIT, "_slack": "slack"}  # a flag's name keeps what is no unit
_UNIONS = (Union, UnionType)
_POWERS = {"T": 2**40, "G": 2**30, "M": 2**20, "K": 2**10}


class Flag(msgspec.Struct, frozen=True):
    """A field's description beside its name, type and default: `Annotated[int, Flag("...")]`.

    Attributes:
        help: meaning of the value.
        metavar: placeholder of the value in the usage; None takes the usual one for its kind.
        default: meaning of the default, if None or "auto" does not say it.
        name: name of the flag without leading dashes; None derives it from the field's name.
        group: heading that the flag is listed under; None takes `Config.flag_group`.
        one_of: at most one of the flags with the same `one_of` may be given.
        is_spaced: whether several texts are separate arguments, not one with commas.
        behind: the duration field after or in place of whose value this one is typed: it has no
            flag of its own.
        may_be_empty: whether an empty text is a value, not a shell's unset variable.
    """

    help: str
    metavar: str | None = None
    default: str | None = None
    name: str | None = None
    group: str | None = None
    one_of: str | None = None
    is_spaced: bool = False
    behind: str | None = None
    may_be_empty: bool = False


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a configuration.

    Attributes:
        type: type in a signature.
        annotation: the type with the range of its values.
        option: its flag as typed: the field's name without a unit at its end.
        choices: all values of a "choice".
        group: heading that the flag is listed under.
    """

    name: str
    type: Any
    annotation: Any
    default: Any
    kind: Kind
    option: str
    choices: tuple[str, ...]
    group: str
    flag: Flag

    @property
    def description(self) -> str:
        """Meaning of the value, and its default."""
        is_told = self.kind == "switch" or bool(self.default)
        default = [written(self.kind, self.default)] if is_told else []
        if self.flag.default is not None:
            default.append(self.flag.default)
        return f"{self.flag.help} (default: {', '.join(default)})" if default else self.flag.help


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one subsystem; every field is described by a `Flag`.

    Values are converted to the fields' types, so that a list may stand for a tuple.

    Attributes:
        flag_group: heading that the flags are listed under.

    Raises:
        ConfigError: a value is of another type, or out of range.
    """

    flag_group: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            try:
                checked = msgspec.convert(value, field.annotation)
            except msgspec.ValidationError as error:
                raise ConfigError(_refusal(field, value, str(error))) from None
            try:
                msgspec.msgpack.encode(checked)
            except UnicodeEncodeError:  # not shown: it may be a key
                raise ConfigError(f"{field.name} has bytes that are not UTF-8") from None
            msgspec.structs.force_setattr(self, field.name, checked)


@functools.cache
def fields_of(config: type[Config]) -> tuple[Field, ...]:
    """Return all fields, in the order of their declaration."""
    types = get_type_hints(config)
    return tuple(_field(config, info, types[info.name]) for info in msgspec.structs.fields(config))


def written(kind: Kind, value: Any) -> str:
    """Return a value as a user types it; not for "classes"."""
    match kind:
        case "switch":
            return "yes" if value else "no"
        case "duration":
            return _duration(value)
        case "size":
            return _size(value)
        case "slack":
            return _slack(value)
        case "texts":
            return ",".join(value)
        case "names":
            return " ".join(value)
        case "weights":
            return ",".join(f"{name}={weight}" for name, weight in value.items())
    return str(value)


def _field(config: type[Config], info: msgspec.structs.FieldInfo, type_: Any) -> Field:
    flag = next((said for said in get_args(info.type) if isinstance(said, Flag)), None)
    if flag is None:
        raise TypeError(f"{config.__name__}.{info.name} is not described by a Flag")
    plain = _without_none(type_)
    kind = "names" if flag.is_spaced else _kind(info.name, plain)
    unit = next((unit for unit, unit_kind in _BY_UNIT.items() if kind == unit_kind), "")
    name = flag.name or info.name.removesuffix(unit).replace("_", "-")
    has_factory = info.default_factory is not msgspec.NODEFAULT
    return Field(
        name=info.name,
        type=type_,
        annotation=info.type,
        default=info.default_factory() if has_factory else info.default,
        kind=kind,
        option=f"--{name}",
        choices=_choices(kind, plain),
        group=flag.group or config.flag_group,
        flag=flag,
    )


def _choices(kind: Kind, plain: Any) -> tuple[str, ...]:
    if kind == "count_or_word":
        plain = next(one for one in get_args(plain) if get_origin(one) is Literal)
    return get_args(plain) if kind in ("choice", "count_or_word") else ()


def _kind(name: str, plain: Any) -> Kind:
    if get_origin(plain) in _UNIONS:
        return "count_or_word"
    if plain == dict[str, float]:
        return "weights"
    by_type = _BY_TYPE.get(get_origin(plain) or plain)
    if by_type is not None:
        return by_type
    number: Kind = "count" if plain is int else "number"
    return next((kind for end, kind in _BY_END.items() if name.endswith(end)), number)


def _without_none(type_: Any) -> Any:
    if get_origin(type_) not in _UNIONS:
        return type_
    plain = [one for one in get_args(type_) if one is not NoneType]
    return plain[0] if len(plain) == 1 else type_


def _refusal(field: Field, value: Any, reason: str) -> str:
    if field.choices:
        number = "a number, " if field.kind == "count_or_word" else ""
        return f"{field.name} is {number}one of {', '.join(field.choices)}, got {value!r}"
    got = "" if "got" in reason else f", got {value!r}"
    return f"{field.name}: {reason[0].lower()}{reason[1:]}{got}"


def _duration(seconds: float) -> str:
    """Return a duration with all digits, and without an exponent."""
    exact = Decimal(str(seconds))
    number, unit = (1000 * exact, "ms") if exact < 1 else (exact, "s")
    return f"{number.normalize():f}{unit}"


def _slack(fraction: float) -> str:
    if math.isinf(fraction):
        return "unbounded"
    return f"{(100 * Decimal(str(fraction))).normalize():f}%"


def _size(num_bytes: int) -> str:
    fitting = (unit for unit, power in _POWERS.items() if num_bytes % power == 0)
    unit = next(fitting, "")
    return f"{num_bytes // _POWERS.get(unit, 1)}{unit}"
