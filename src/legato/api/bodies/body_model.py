"""Base models of bodies, and the parser that checks their model's name and their lengths."""

import json
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from legato.api.config import ServerConfig, UnknownFields
from legato.api.http.errors import first_problem, unknown_model
from legato.api.http.json_text import parse_json
from legato.api.job import Warned
from legato.api.limits import MAX_FIELDS, MAX_NAME_CHARS
from legato.checkpoint.defaults import ModelDefaults
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import SamplingParams
from legato.engine.client.requests import check_token_ids, with_bad_words
from legato.engine.process.engine_messages import EngineInfo
from legato.language.conversation.guard import MessageSpecialTokens
from legato.language.conversation.rewrite import why_not_read

if TYPE_CHECKING:  # the server's process parses no bodies
    from legato.language.conversation.prompt import ChatPrompts
    from legato.language.forms.check import GrammarChecker
    from legato.language.tokenizer.tokenizer import Tokenizer

_NULL = {"type": "null"}
_BOUNDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}  # key: JSON type


class IgnoredFields:
    """Drops the unknown fields of a request's objects; the context of its validation.

    Attributes:
        names: of the dropped fields, each once, in the order of the request.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def drop(self, model: type[BaseModel], sent: dict[str, Any]) -> None:
        """Remove from an object what its model would refuse to know."""
        if model.model_config.get("extra") != "forbid":
            return
        known = _names(model)
        for name in [name for name in sent if name not in known]:
            del sent[name]
            self.names[name] = None


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model by the names in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class RequestModel(BaseModel):
    """A JSON object that refuses unknown fields; null is the same as not sent.

    With `IgnoredFields` as the context of the validation, it drops them.
    JSON has one kind of number: 16.0 is as good an integer as 16.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise InvalidRequestError(f"an object has {len(data)} fields, over {MAX_FIELDS}")
        sent = {name: _whole(value) for name, value in data.items() if value is not None}
        if isinstance(info.context, IgnoredFields):
            info.context.drop(cls, sent)
        return sent

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        fields = described.get("properties", {})
        for name in fields.keys() - described.get("required", ()):
            if "anyOf" not in fields[name]:
                fields[name] = {"anyOf": [fields[name]]}
            if _NULL not in fields[name]["anyOf"]:
                fields[name]["anyOf"] = [*fields[name]["anyOf"], _NULL]
        if described.get("additionalProperties") is False:
            described["additionalProperties"] = _NULL
        return described


def set_fields(request: RequestModel, sent_as: str, **values: Any) -> None:
    """Set fields whose values were sent in another form. Args: values: key a field; None if absent.

    Raises:
        InvalidRequestError: a field itself was sent, too, with another value.
    """
    for name, value in values.items():
        if value is None:
            continue
        if name in request.model_fields_set and getattr(request, name) != value:
            raise InvalidRequestError(
                f"{sent_as} is another form of {name}; they must not differ", param=sent_as
            )
        setattr(request, name, value)


class LenientModel(RequestModel):
    """Ignores unknown fields: clients send back objects with more in them."""

    model_config = ConfigDict(extra="ignore")


class PartError(ValueError):
    """An error within the value of a field.

    Attributes:
        path: keys and indices that lead from the field to the error.
    """

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _CheckedBefore:
    """Checks a value before its type is validated. Subclasses have `_check`."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        raise NotImplementedError


class AtMost(_CheckedBefore):
    """Bounds the length of a text, list or object before its parts are validated.

    It must stand last in an `Annotated`. pydantic's own `max_length` would count the converted
    value.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        for one in described.get("anyOf", [described]):
            if one.get("type") in _BOUNDS:
                one[_BOUNDS[one["type"]]] = self._limit
        return described

    def _check(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict) and len(value) > self._limit:
            unit = "characters" if isinstance(value, str) else "entries"
            raise ValueError(f"has {len(value)} {unit}, over {self._limit}")
        return value


class OrText(_CheckedBefore):
    """A list, or a text in its place.

    Args:
        as_list: converts the text to a list.
    """

    def __init__(self, as_list: Callable[[str], list[Any]]) -> None:
        self._as_list = as_list

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _check(self, value: Any) -> Any:
        return self._as_list(value) if isinstance(value, str) else value


class _Only:
    def __init__(self, allowed: tuple[object, ...]) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": list(self._allowed)}

    def _check(self, value: object) -> object:
        if value not in self._allowed:
            supported = " or ".join(map(json.dumps, self._allowed))
            raise ValueError(f"only {supported} is supported")
        return value


def only(*allowed: object) -> _Only:
    """Accept only these values of a field, which change nothing; refuse others as unsupported."""
    return _Only(allowed)


def by_type(what: str, *kinds: str, **others: str) -> tuple[Discriminator, BeforeValidator]:
    """Choose a model of a union by an object's "type"; each has a `Tag` of `<type>`.

    Args:
        what: the name for such an object in errors.
        others: types that share a tag; key the type, value the tag without brackets.
    """

    def tag(value: Any) -> str:
        kind: str = value["type"] if isinstance(value, dict) else value.type
        return f"<{others.get(kind, kind)}>"

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind not in kinds and not (isinstance(kind, str) and kind in others):
            named = json.dumps(kind, default=str)
            raise ValueError(f"{what} of type {named} is not supported{why_not_read(kind)}")
        return value

    return Discriminator(tag), BeforeValidator(check)


Name = Annotated[str, AtMost(MAX_NAME_CHARS)]
Prompt = str | list[int]
"""A prompt as a client sends it: a text or token ids."""


class ModelRequest(RequestModel):
    """A request that names a model; only the served one exists."""

    model: Name | None = None
    """The served model's name."""


Kind = Literal[
    "chat",
    "completions",
    "embeddings",
    "score",
    "rerank",
    "responses",
    "input_tokens",
    "messages",
    "count_tokens",
    "generate",
    "tokenize",
    "detokenize",
    "tokenizer_info",
    "apply_template",
    "ollama_chat",
    "ollama_generate",
    "ollama_embed",
    "ollama_embeddings",
    "ollama_tags",
    "ollama_ps",
    "ollama_show",
    "ollama_pull",
    "props",
    "render_chat",
    "render_completions",
    "render_messages",
    "render_responses",
]
"""The endpoint that a body was sent to."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the settings that bodies are parsed with.

    Attributes:
        max_completions, default_max_tokens, max_output_tokens, reasoning_budget,
            reasoning_budget_message, max_reasoning_budget, trust_request_chat_template,
            message_special_tokens, unknown_fields: as in `ServerConfig`.
        shows_template: whether clients may see the chat template.
    """

    info: EngineInfo
    max_completions: int
    default_max_tokens: int | None
    max_output_tokens: int | None
    reasoning_budget: int | None = None
    reasoning_budget_message: str | None = None
    max_reasoning_budget: int | None = None
    trust_request_chat_template: bool
    message_special_tokens: MessageSpecialTokens
    unknown_fields: UnknownFields
    shows_template: bool = False

    @classmethod
    def of(cls, info: EngineInfo, config: ServerConfig) -> "Serving":
        """Take the settings from a server's configuration."""
        names = {*cls.__struct_fields__} - {"info", "shows_template"}
        return cls(
            info=info,
            shows_template=config.enable_tokenizer_info_endpoint,
            **{name: getattr(config, name) for name in names},
        )


_Model = TypeVar("_Model", bound=ModelRequest)


class BodyParser:
    """Parses the bodies of requests to one model, one after the other.

    Args:
        max_token_chars: most characters of a token.

    Attributes:
        serving: the model and the settings.
    """

    def __init__(self, serving: Serving, max_token_chars: int) -> None:
        self.serving = serving
        self._max_chars = serving.info.max_model_len * max_token_chars
        self._ignored: IgnoredFields | None = None  # of the present body

    def begin(self) -> None:
        """Forget the fields that were ignored in the last body."""
        is_lenient = self.serving.unknown_fields == "ignore"
        self._ignored = IgnoredFields() if is_lenient else None

    @property
    def ignored_names(self) -> Collection[str]:
        """Names of the fields that were ignored in the present body."""
        return () if self._ignored is None else self._ignored.names

    def parse(self, model: type[_Model], body: bytes) -> _Model:
        """Return a body as a request.

        Raises:
            ApiError: it asks for another model.
            InvalidRequestError: it is no such request.
        """
        request = validated(model, parse_json(body), self._ignored)
        info = self.serving.info
        if request.model is not None and not info.is_called(request.model):
            raise unknown_model(request.model, info.served_model_names)
        return request

    def check_completions(self, n: int, num_prompts: int = 1) -> None:
        """Raises `InvalidRequestError` if a request asks for more than `--max-completions`."""
        num_wanted, allowed = n * num_prompts, self.serving.max_completions
        if num_wanted > allowed:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={n} are {num_wanted} completions; a request may ask "
                f"for {allowed} (--max-completions)",
                param="prompt" if num_prompts > allowed else "n",
            )

    def capped(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with at most `--max-output-tokens` tokens to generate."""
        most = self.serving.max_output_tokens
        if most is None or params.max_tokens is None or params.max_tokens <= most:
            return params
        return msgspec.structs.replace(params, max_tokens=most)

    def check_prompts(self, prompts: Sequence[Prompt], *, is_cut: bool) -> None:
        """Check all prompts before tokenizing the first.

        Args:
            is_cut: whether a text may be longer than the context.

        Raises:
            InvalidRequestError: a text is too long, or a token id does not exist.
        """
        for prompt in prompts:
            if not isinstance(prompt, str):
                check_token_ids(prompt, self.serving.info.vocab_size, "prompt")
            elif not is_cut:
                self.check_fits(len(prompt), "prompt")

    def check_fits(self, num_chars: int, param: str) -> None:
        """Raises `InvalidRequestError` if a text is too long for any tokenization."""
        if num_chars > self._max_chars:
            raise InvalidRequestError(
                f"this model's maximum context length is {self.serving.info.max_model_len} "
                f"tokens, which are at most {self._max_chars} characters, but the prompt has "
                f"{num_chars}",
                param=param,
                code="context_length_exceeded",
            )


class JobMaker:
    """Makes jobs of bodies. Subclasses have a method for each kind, as `RequestReader.read`.

    Args:
        prompts: makes prompts of conversations.
        forms: compiles forms of output.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        defaults: ModelDefaults,
        parser: BodyParser,
        prompts: "ChatPrompts",
        forms: "GrammarChecker",
    ) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._parser = parser
        self._prompts = prompts
        self._forms = forms
        self._info = parser.serving.info
        self._default_limit = defaults.max_tokens or parser.serving.default_max_tokens

    def _limited(
        self, params: SamplingParams, num_prompt_tokens: int, name: str = "max_tokens"
    ) -> Generator[Warned, None, SamplingParams]:
        """Return the parameters with a limit of the output, if there is one; warn of a lower one.

        A limit that the request does not name never exceeds the room in the context. The default is
        at least the request's `min_tokens`.

        Args:
            num_prompt_tokens: of the longest prompt.
            name: the request's name of `max_tokens`.
        """
        capped, serving = self._parser.capped(params), self._parser.serving
        if capped is not params:
            yield Warned(
                f"{name} is {params.max_tokens}, of which this server gives at most "
                f"{capped.max_tokens} (--max-output-tokens)",
                name,
            )
        default = self._default_limit and max(self._default_limit, params.min_tokens)
        limits = [n for n in (default, serving.max_output_tokens) if n is not None]
        if capped.max_tokens is not None or not limits:
            return capped
        room = max(1, self._info.max_model_len - num_prompt_tokens)
        return msgspec.structs.replace(capped, max_tokens=min(*limits, room))

    def _known(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the tokens of their bad words.

        Raises:
            InvalidRequestError: they name a token that the model lacks.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            check_token_ids(getattr(params, name) or (), self._info.vocab_size, name)
        return with_bad_words(params, lambda text: self._tokenizer.encode(text, False))


def validated(model: type[_Model], data: Any, ignored: IgnoredFields | None = None) -> _Model:
    """Return JSON data as a request.

    Raises:
        InvalidRequestError: the first problem that the model finds.
    """
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise first_problem(problems, known=model.model_fields) from None
