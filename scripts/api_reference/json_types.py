"""JSON schemas in words."""

import json
import re
from collections.abc import Iterator, Set
from typing import Any

from legato.api.limits import MAX_NAME_CHARS

Schema = dict[str, Any]

_WIDTH = 88
_LARGE = 2**16
_TOKEN_ID = {"type": "integer", "minimum": 0}


def resolved(schema: Schema, document: Schema) -> Schema:
    """What a reference into an OpenAPI document stands for."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def type_words(schema: Schema) -> str:
    """Return the type of a field and the range of its values, without null: it is "not sent"."""
    alternatives = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_one_type, alternatives)))


def references(schema: Schema, document: Schema) -> Iterator[str]:
    """Yield the names of all schemas that a schema refers to, and that those refer to."""
    for name in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(schema)):
        yield name
        yield from references(document["components"]["schemas"][name], document)


def skeleton(schema: Schema, document: Schema, named: Set[str] = frozenset()) -> str:
    """Return an object as it would look, with types in the place of values.

    Args:
        named: schemas that stand by their names.
    """
    text = _value(schema, document, named)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _one_type(schema: Schema) -> str:
    if "enum" in schema:
        only = "only " if len(schema["enum"]) == 1 else ""
        return only + ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"only `{json.dumps(schema['const'])}`"
    if "oneOf" in schema or not schema:
        return "object" if schema else "any"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    match schema["type"]:
        case "integer" | "number":
            return f"{schema['type']}{_range(schema)}"
        case "array":
            return f"list{_most(schema, 'maxItems')} of {_plural(schema['items'])}"
        case "string":
            return "string" + _most(schema, "maxLength", usual=MAX_NAME_CHARS)
        case "object":
            return "object" + _most(schema, "maxProperties")
    return str(schema["type"])


def _most(schema: Schema, key: str, usual: int | None = None) -> str:
    most = schema.get(key)
    return "" if most in (None, usual) else f" ≤{most}"


def _plural(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_plural, schema["anyOf"]))
    if schema == _TOKEN_ID:
        return "token ids"
    if "enum" in schema:
        return _one_type(schema)
    kind, _, rest = _one_type(schema).partition(" ")
    return f"{kind}s {rest}".rstrip() if "type" in schema or "oneOf" in schema else kind


def _range(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        return ""
    if high is None:
        return f" ≥{_number(low)}" if "minimum" in schema else f" >{_number(low)}"
    if schema.keys() >= {"minimum", "maximum"}:
        return f" {_number(low)}..{_number(high)}"
    left = "[" if "minimum" in schema else "("
    right = "]" if "maximum" in schema else ")"
    return f" in {left}{_number(low)}, {_number(high)}{right}"


def _number(value: float) -> str:
    exponent = int(abs(value)).bit_length() - 1
    if abs(value) >= _LARGE and abs(value) == 2**exponent:
        return f"{'-' if value < 0 else ''}2^{exponent}"
    return f"{value:g}"


def _value(schema: Schema, document: Schema, named: Set[str]) -> str:
    name: str = schema.get("$ref", "").rpartition("/")[2]
    if name in named:
        return name
    schema = resolved(schema, document)
    if not schema:
        return "any"
    if "anyOf" in schema:
        return "|".join(_value(one, document, named) for one in schema["anyOf"])
    if "enum" in schema:
        return "|".join(map(json.dumps, schema["enum"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema["type"] == "array":
        return f"[{_value(schema['items'], document, named)}, ...]"
    if "properties" in schema:
        members = {json.dumps(name): one for name, one in schema["properties"].items()}
    elif isinstance(schema.get("additionalProperties"), dict):
        members = {"string": schema["additionalProperties"]}
    else:
        return str(schema["type"])
    lines = [f"{name}: {_value(one, document, named)}" for name, one in members.items()]
    inline = f"{{{', '.join(lines)}}}"
    if len(inline) <= _WIDTH and "\n" not in inline:
        return inline
    inner = ",\n".join(lines).replace("\n", "\n  ")
    return f"{{\n  {inner}\n}}"
