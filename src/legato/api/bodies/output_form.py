"""The form of the output, in OpenAI's fields or vLLM's."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, InstanceOf, WithJsonSchema, model_validator

from legato.api.bodies.body_model import ModelRequest, Name, RequestModel
from legato.core.errors import InvalidRequestError, naming_fields
from legato.core.structured_outputs import StructuredOutputs
from legato.language.forms.source import enforced

_TEXT_OR_OBJECT = {"anyOf": [{"type": "string"}, {"type": "object"}]}
_FORM = {
    "type": "object",
    "properties": {
        "json": _TEXT_OR_OBJECT,
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": {"type": "string"}},
        "grammar": {"type": "string"},
        "json_object": {"type": "boolean"},
        "structural_tag": _TEXT_OR_OBJECT,
        "disable_any_whitespace": {"type": "boolean"},
        "whitespace_pattern": {"type": "string"},
    },
    "additionalProperties": False,
}


def _as_form(value: Any) -> StructuredOutputs:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    given = {name: part for name, part in value.items() if part is not None}
    unknown = given.keys() - set(StructuredOutputs.__struct_fields__)
    if unknown:
        name = f"structured_outputs.{min(unknown)}"
        raise InvalidRequestError(
            f"{name} is not supported", param=name, code="unsupported_parameter"
        )
    try:
        return msgspec.convert(given, StructuredOutputs)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, InvalidRequestError) else ValueError(error) from None


Form = Annotated[InstanceOf[StructuredOutputs], BeforeValidator(_as_form), WithJsonSchema(_FORM)]


class JsonSchemaFormat(RequestModel):
    """Form of an answer by a schema."""

    name: Name
    """Changes nothing: the model is not shown it."""
    description: str | None = None
    """Changes nothing: the model is not shown it."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON schema; by default, any object."""
    strict: bool = False
    """Refuse unsupported keywords instead of ignoring them."""

    @property
    def enforced(self) -> dict[str, Any]:
        """The schema, prepared for `StructuredOutputs`."""
        schema = {"type": "object"} if self.schema_ is None else self.schema_
        return enforced(schema, is_strict=self.strict)


class ResponseFormat(RequestModel):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """`structural_tag` is vLLM's."""
    json_schema: JsonSchemaFormat | None = None
    """With `json_schema`."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """llama.cpp's schema, with `json_object`."""
    structures: list[dict[str, Any]] | None = None
    """Old form of structural tags, with `triggers`."""
    triggers: list[str] | None = None
    """Texts with which tags begin."""
    format: dict[str, Any] | None = None
    """New form of structural tags."""

    @model_validator(mode="after")
    def _check_together(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                'json_schema goes with "type": "json_schema", and the other way round',
                param="response_format.json_schema",
            )
        if self.schema_ is not None and self.type != "json_object":
            raise InvalidRequestError(
                'schema goes with "type": "json_object" only', param="response_format.schema"
            )
        return self

    @property
    def form(self) -> StructuredOutputs | None:
        match self.type:
            case "text":
                return None
            case "json_object" if self.schema_ is not None:
                return StructuredOutputs(json=enforced(self.schema_, is_strict=False))
            case "json_object":
                return StructuredOutputs(json_object=True)
            case "json_schema":
                assert self.json_schema is not None, "checked"
                return StructuredOutputs(json=self.json_schema.enforced)
            case "structural_tag":
                return StructuredOutputs(structural_tag=self.model_dump(exclude_none=True))


class OutputForm(ModelRequest):
    """The form of the output; at most one of these is set."""

    response_format: ResponseFormat | None = None
    """Form of the output: text, JSON, or JSON by a schema."""
    structured_outputs: Form | None = None
    """[Form](python.md#structuredoutputs) of the output, in vLLM's words."""
    guided_json: str | dict[str, Any] | None = None
    """Another name of `structured_outputs.json`."""
    guided_regex: str | None = None
    """Another name of `structured_outputs.regex`."""
    guided_choice: list[str] | None = None
    """Another name of `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """Another name of `structured_outputs.grammar`."""
    regex: str | None = None
    """Another name of `structured_outputs.regex`."""
    ebnf: str | None = None
    """Another name of `structured_outputs.grammar`."""
    grammar: str | None = None
    """Another name of `structured_outputs.grammar`."""
    json_schema: str | dict[str, Any] | None = None
    """Another name of `structured_outputs.json`."""

    @model_validator(mode="after")
    def _check_forms(self) -> "OutputForm":
        if len(self._forms) > 1:
            names = list(self._forms)
            raise InvalidRequestError(f"{' and '.join(names)} exclude each other", param=names[1])
        return self

    @property
    def output_form(self) -> StructuredOutputs | None:
        """The form that the output must have; None leaves it free."""
        return next(iter(self._forms.values()), None)

    @property
    def form_names(self) -> dict[str, str]:
        """Key a field of `output_form`, value the client's name of it."""
        if self.structured_outputs is not None:
            return {}
        if self.response_format is not None:
            is_plain = self.response_format.json_schema is None
            schema = "schema" if is_plain else "json_schema.schema"
            return {
                "structured_outputs.json": f"response_format.{schema}",
                "structured_outputs.structural_tag": "response_format",
            }
        return {f"structured_outputs.{_PEERS_FORMS[name]}": name for name in self._forms}

    @property
    def _forms(self) -> dict[str, StructuredOutputs]:
        """The forms that the request asks for; key the field."""
        forms = {"structured_outputs": self.structured_outputs}
        if self.response_format is not None:
            forms["response_format"] = self.response_format.form
        for name, form in _PEERS_FORMS.items():
            value = getattr(self, name)
            if value is not None:
                with naming_fields(**{f"structured_outputs.{form}": name}):
                    forms[name] = StructuredOutputs(**{form: value})
        return {name: form for name, form in forms.items() if form is not None}


_PEERS_FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Key a field of older vLLM, SGLang or llama.cpp; value the field of `StructuredOutputs`."""
