"""The bodies of Ollama's endpoints: chats, prompts and vectors, and the jobs made of them."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field

from legato.api.bodies.as_chat import ChatBody
from legato.api.bodies.body_model import (
    AtMost,
    BodyParser,
    ModelRequest,
    Name,
    OrText,
    only,
    validated,
)
from legato.api.bodies.chat_messages import ChatMessage
from legato.api.bodies.chat_tools import Tools
from legato.api.bodies.generation_options import NumLogprobs, ServiceOptions, Strings
from legato.api.bodies.hints import OllamaSettings, UnaskedSamplers
from legato.api.job import End, Part, Warned, answered
from legato.api.limits import MAX_MESSAGES
from legato.api.openai.chat_job import ChatJobs
from legato.api.openai.completion_body import CompletionJobs
from legato.api.openai.embedding_body import EmbeddingRequest
from legato.api.openai.pooled_prompts import PooledPrompts
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import MAX_REPETITION_PENALTY, SEED_LIMIT, TOP_K_LIMIT
from legato.language.conversation.rewrite import why_not_read

_DURATION = re.compile(r"-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|-?0")
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "seed": "seed",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}
"""Options; key the name in OpenAI's API."""
_NAMES = {
    **{name: f"options.{ours}" for name, ours in _SAMPLING.items()},
    "response_format": "format",
    "reasoning_effort": "think",
    "enable_thinking": "think",
}


def _no_images(images: Any) -> Any:
    if images:
        raise ValueError(f"is not supported{why_not_read('images')}")
    return images


def _duration(value: Any) -> Any:
    if isinstance(value, str) and not _DURATION.fullmatch(value):
        raise ValueError("must be a number of seconds, or a duration such as 5m or -1m")
    return value


def _without_nulls(tools: Any) -> Any:
    """Remove what clients in Go send for a function without parameters: null for none."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        schema = function.get("parameters") if isinstance(function, dict) else None
        if isinstance(schema, dict):
            for name in ("properties", "required"):
                if schema.get(name, "") is None:
                    del schema[name]
    return tools


KeepAlive = Annotated[float | str, BeforeValidator(_duration)]


class OllamaOptions(OllamaSettings, UnaskedSamplers):
    """Sampling, as Ollama names it; unset options are the model's defaults, not Ollama's."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Softmax temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, lt=TOP_K_LIMIT)] | None = None
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the fewest most likely tokens whose probability reaches this."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this fraction of the most likely one."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted per occurrence in the output."""
    repeat_penalty: (
        Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    """Makes tokens of prompt and output less likely, above 1."""
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """0 switches `repeat_penalty` off; it counts all tokens, as with -1."""
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    """Makes the tokens reproducible; -1 is none."""
    stop: Strings | None = None
    """Strings that end the output."""
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    """Most tokens to generate; 0, -1 and -2 take what the context holds, the default."""
    num_ctx: Annotated[int, Field(ge=0)] | None = None
    """Refused above the server's context; the context is never smaller."""
    penalize_newline: Annotated[bool, only(True)] | None = None
    """Penalties count all tokens."""
    draft_num_predict: int | None = None
    """Changes nothing: for Ollama."""
    f16_kv: bool | None = None
    """Changes nothing: for Ollama."""
    logits_all: bool | None = None
    """Changes nothing: for Ollama."""
    vocab_only: Annotated[bool, only(False)] | None = None
    """Models are served whole."""
    embedding_only: Annotated[bool, only(False)] | None = None
    """Models are served whole."""

    def unheeded(self, max_model_len: int) -> Iterator[Warned]:
        """Yield warnings about options that ask for another answer, and get none.

        Raises:
            InvalidRequestError: the context is to be larger than it is.
        """
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            raise InvalidRequestError(
                f"options.num_ctx is {self.num_ctx}, but this server's context has "
                f"{max_model_len} tokens (--max-model-len)",
                param="options.num_ctx",
            )
        if self.num_ctx is not None and 0 < self.num_ctx < max_model_len:
            yield Warned(
                f"options.num_ctx has no effect: the context has {max_model_len} tokens",
                "options.num_ctx",
            )
        if self.repeat_last_n not in (None, 0, -1) and self.repeat_penalty not in (None, 1):
            yield Warned(
                "options.repeat_last_n has no effect: repeat_penalty counts all tokens",
                "options.repeat_last_n",
            )

    def chat(self) -> dict[str, Any]:
        """Return the options as a chat's fields; None counts as absent."""
        fields = {name: getattr(self, ours) for name, ours in _SAMPLING.items()}
        if self.num_predict is not None and self.num_predict <= 0:
            fields["max_tokens"] = None
        if self.seed == -1:
            fields["seed"] = None
        if self.repeat_last_n == 0:
            fields["repetition_penalty"] = 1
        if self.stop is not None:
            fields["stop"] = list(self.stop)
        return fields


class OllamaRequest(ServiceOptions, ModelRequest):
    """A request of any kind."""

    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Sampling, as Ollama names it."""
    keep_alive: KeepAlive | None = None
    """Changes nothing: the model stays loaded."""

    def shared_options(self) -> dict[str, Any]:
        """Return the options of service that the client sent, in JSON."""
        names = self.model_fields_set & ServiceOptions.model_fields.keys()
        return self.model_dump(mode="json", include=names)

    @property
    def unloads(self) -> bool:
        """Whether the model is to be unloaded after the request."""
        return (
            self.keep_alive is not None
            and re.fullmatch(r"-?0+(\.0*)?[a-zµ]*", str(self.keep_alive)) is not None
        )

    def unheeded(self, max_model_len: int) -> Iterator[Warned]:
        """Yield warnings about fields that have no effect."""
        if self.unloads:
            yield Warned("keep_alive has no effect: the model stays loaded", "keep_alive")
        yield from self.options.unheeded(max_model_len)


class OllamaGeneration(OllamaRequest):
    """What chats and prompts have in common."""

    stream: bool = True
    """Answer with a line of JSON for each piece."""
    format: Literal["json", ""] | dict[str, Any] | None = None
    """`json`, or a JSON schema that the answer follows."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """Switch thinking on or off, or how much of it, if the chat template can."""
    logprobs: bool = False
    """Return log probabilities of the sampled tokens."""
    top_logprobs: NumLogprobs | None = None
    """Log probabilities of this many most likely tokens, with `logprobs`."""
    truncate: bool | None = None
    """Changes nothing: a prompt that does not fit is refused, never cut."""
    shift: bool | None = None
    """Changes nothing: the output ends where the context does."""
    debug_render_only: Annotated[bool, only(False), Field(alias="_debug_render_only")] = False
    """Use `/apply-template`."""

    def unheeded(self, max_model_len: int) -> Iterator[Warned]:
        yield from super().unheeded(max_model_len)
        if self.truncate:
            yield Warned("truncate has no effect: a prompt that is too long is refused", "truncate")
        if self.shift:
            yield Warned("shift has no effect: the output ends where the context does", "shift")

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of a chat but for its messages; None counts as absent."""
        form: dict[str, Any] | None = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif self.format:
            schema = {"name": "output", "schema": self.format, "strict": True}
            form = {"type": "json_schema", "json_schema": schema}
        has_effort = isinstance(self.think, str)
        return {
            **self.options.chat(),
            "stream": self.stream,
            "response_format": form,
            "enable_thinking": True if has_effort else self.think,
            "reasoning_effort": self.think if has_effort else None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }


class OllamaMessage(ChatMessage):
    """A message of a conversation."""

    thinking: str | None = None
    """Reasoning of an earlier answer."""
    tool_name: Name | None = None
    """The function whose result a `tool` message has."""

    def chat(self) -> dict[str, Any]:
        """Return a `ChatMessage` in JSON's form."""
        plain = self.model_dump(mode="json", exclude={"thinking", "tool_name"}, exclude_none=True)
        if self.thinking:
            plain["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            plain["name"] = self.tool_name
        return plain


class OllamaChatRequest(OllamaGeneration):
    """A conversation to answer; without messages, the model is only to be loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True), AtMost(MAX_MESSAGES)] = Field(
        default_factory=list
    )
    """The conversation."""
    tools: Annotated[Tools, BeforeValidator(_without_nulls)] | None = None
    """[Functions](../guides/tools.md) that the model may call."""

    def chat(self) -> ChatBody:
        described = [tool.model_dump(mode="json", exclude_none=True) for tool in self.tools or ()]
        fields = {
            **self.chat_fields(),
            "messages": [message.chat() for message in self.messages],
            "tools": described or None,
        }
        return ChatBody(fields, [f"messages.{i}" for i in range(len(self.messages))], _NAMES)


class OllamaGenerateRequest(OllamaGeneration):
    """A prompt to answer; without one, the model is only to be loaded."""

    prompt: str = ""
    """The user's message, or with `raw` the whole prompt."""
    system: str = ""
    """System message before the prompt."""
    raw: bool = False
    """The prompt goes to the model without a chat template."""
    suffix: Annotated[str, only("")] = ""
    """Filling in the middle is not supported."""
    template: Annotated[str, only("")] = ""
    """Templates in Go are not supported."""
    context: Annotated[list[int], only([]), AtMost(0)] | None = None
    """Not supported: use `/api/chat`."""
    images: Annotated[list[str], only([]), AtMost(0), BeforeValidator(_no_images)] | None = None
    """Only text is supported."""

    def chat(self) -> ChatBody:
        said = [("system", self.system), ("user", self.prompt)]
        messages = [{"role": role, "content": text} for role, text in said if text]
        places = [name for name, text in (("system", self.system), ("prompt", self.prompt)) if text]
        return ChatBody({**self.chat_fields(), "messages": messages}, places, _NAMES)

    def completion(self) -> ChatBody:
        """Return the fields of a completion of the prompt, as it is."""
        fields = self.chat_fields()
        for name in ("enable_thinking", "reasoning_effort", "top_logprobs"):
            fields.pop(name)
        fields["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        names = {**_NAMES, "logprobs": "top_logprobs"}
        return ChatBody({**fields, "prompt": self.prompt}, [], names)


class OllamaVectors(OllamaRequest):
    """What both forms have in common."""

    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Changes nothing: vectors are not sampled; `num_ctx` is checked."""


class OllamaEmbedRequest(OllamaVectors):
    """Texts that become vectors."""

    input: Annotated[list[str], Field(fail_fast=True, min_length=1), OrText(lambda text: [text])]
    """A text, or a list of them."""
    truncate: bool | None = None
    """Cut the ends of texts that the context cannot hold; otherwise they are refused."""
    dimensions: Annotated[int, Field(ge=0)] | None = None
    """Return this many first numbers of each vector; 0 returns all."""


class OllamaEmbeddingsRequest(OllamaVectors):
    """A text that becomes a vector, in Ollama's older form."""

    prompt: str
    """The text."""


class OllamaMessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET


class OllamaLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request without a prompt.

    Attributes:
        message, response: of a chat, or else of a prompt.
    """

    model: str
    created_at: str
    message: OllamaMessageAnswer | UnsetType = UNSET
    response: str | UnsetType = UNSET
    done: bool = True
    done_reason: Literal["load", "unload"]


class OllamaJobs:
    """Makes jobs of Ollama's bodies.

    Its methods raise as `RequestReader.read`.
    """

    def __init__(
        self,
        parser: BodyParser,
        chats: ChatJobs,
        completions: CompletionJobs,
        pooled: PooledPrompts,
    ) -> None:
        self._parser = parser
        self._chats = chats
        self._completions = completions
        self._pooled = pooled
        self._info = parser.serving.info

    def chat(self, body: bytes) -> Iterator[Part | End]:
        """Yield warnings, and the job of a chat."""
        request = self._parser.parse(OllamaChatRequest, body)
        yield from request.unheeded(self._info.max_model_len)
        if not request.messages:
            yield from self._loaded(request, message=OllamaMessageAnswer(content=""))
            return
        yield from self._answered(request, request.chat())

    def generate(self, body: bytes) -> Iterator[Part | End]:
        """Yield warnings, and the job of a prompt."""
        request = self._parser.parse(OllamaGenerateRequest, body)
        yield from request.unheeded(self._info.max_model_len)
        if not request.prompt:
            yield from self._loaded(request, response="")
            return
        if not request.raw:
            yield from self._answered(request, request.chat())
            return
        if request.system:
            raise InvalidRequestError("system does not go with raw: true", param="system")
        yield from self._completions.read_other(request.shared_options(), request.completion())

    def embed(self, body: bytes) -> Iterator[Part | End]:
        """Yield the job of texts that become vectors."""
        request = self._parser.parse(OllamaEmbedRequest, body)
        yield from request.unheeded(self._info.max_model_len)
        yield from self._vectors(
            request,
            input=request.input,
            dimensions=request.dimensions or None,
            truncate_prompt_tokens=-1 if request.truncate else None,
        )

    def embeddings(self, body: bytes) -> Iterator[Part | End]:
        """Yield the job of the older form, whose vector's length is not 1."""
        request = self._parser.parse(OllamaEmbeddingsRequest, body)
        yield from request.unheeded(self._info.max_model_len)
        with ChatBody({}, [], {"input": "prompt"}).naming_fields():
            yield from self._vectors(request, input=request.prompt, normalize=False)

    def _answered(self, request: OllamaGeneration, chat: ChatBody) -> Iterator[Part | End]:
        return self._chats.read_other(
            request.shared_options(), chat, "chat", field_names={}, bounds_output=True
        )

    def _vectors(self, request: OllamaRequest, **fields: Any) -> Iterator[Part | End]:
        shared = {**request.shared_options(), **fields}
        yield from self._pooled.embedded(validated(EmbeddingRequest, shared))

    def _loaded(self, request: OllamaGeneration, **empty: Any) -> Iterator[Part | End]:
        return answered(
            OllamaLoaded(
                model=self._info.served_model_name,
                created_at=timestamp(),
                done_reason="unload" if request.unloads else "load",
                **empty,
            )
        )


def timestamp() -> str:
    """Return the present time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
