"""JSON schemas in words."""

import json
from typing import Any

Schema = dict[str, Any]

_WIDTH = 88
_LARGE = 2**16
_TOKEN_ID = {"type": "integer", "minimum": 0}


def resolved(schema: Schema, document: Schema) -> Schema:
    """What a reference into an OpenAPI document stands for."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def type_words(schema: Schema) -> str:
    """The type of a field and the range of its values; null, which is "not sent", is left out."""
    alternatives = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    words = [_one_type(one) for one in alternatives]
    return (", or " if any(" or " in text for text in words) else " or ").join(words)


def skeleton(schema: Schema, document: Schema) -> str:
    """An object as it would look, with types in the place of values."""
    text = _value(schema, document)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _one_type(schema: Schema) -> str:
    if "enum" in schema:
        only = "only " if len(schema["enum"]) == 1 else ""
        return only + " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
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
            most = f"at most {schema['maxItems']} " if "maxItems" in schema else ""
            return f"list of {most}{_plural(schema['items'])}"
        case "string" if "maxLength" in schema:
            return f"string of at most {schema['maxLength']} characters"
        case "object" if "maxProperties" in schema:
            return f"object of at most {schema['maxProperties']} entries"
    return str(schema["type"])


def _plural(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_plural, schema["anyOf"]))
    if schema == _TOKEN_ID:
        return "token ids"
    kind, _, rest = _one_type(schema).partition(" ")
    return f"{kind}s {rest}".rstrip() if "type" in schema else kind


def _range(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        return ""
    if high is None:
        return f" of at least {_number(low)}" if "minimum" in schema else f" above {_number(low)}"
    left = "[" if "minimum" in schema else "("
    right = "]" if "maximum" in schema else ")"
    return f" in {left}{_number(low)}, {_number(high)}{right}"


def _number(value: float) -> str:
    exponent = int(abs(value)).bit_length() - 1
    if abs(value) >= _LARGE and abs(value) == 2**exponent:
        return f"{'-' if value < 0 else ''}2^{exponent}"
    return f"{value:g}"


def _value(schema: Schema, document: Schema) -> str:
    schema = resolved(schema, document)
    if not schema:
        return "any"
    if "anyOf" in schema:
        return " or ".join(_value(one, document) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if schema["type"] == "array":
        return f"[{_value(schema['items'], document)}, ...]"
    if "properties" in schema:
        members = {json.dumps(name): one for name, one in schema["properties"].items()}
    elif "additionalProperties" in schema:
        members = {"string": schema["additionalProperties"]}
    else:
        return str(schema["type"])
    lines = [f"{name}: {_value(one, document)}" for name, one in members.items()]
    inline = f"{{{', '.join(lines)}}}"
    if len(inline) <= _WIDTH and "\n" not in inline:
        return inline
    inner = ",\n".join(lines).replace("\n", "\n  ")
    return f"{{\n  {inner}\n}}"
