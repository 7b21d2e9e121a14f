"""What Ollama's and llama-server's endpoints say about the served model."""

import hashlib
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from pydantic import model_validator

from legato.api.bodies.body_model import AtMost, JobMaker, ModelRequest, Name, only
from legato.api.http.errors import ApiError, invalid_request
from legato.api.job import End, Part, answered
from legato.api.limits import MAX_FIELDS
from legato.core.errors import InvalidRequestError
from legato.core.version import __version__

_STARTED = datetime.fromtimestamp(int(time.time()), UTC).isoformat().replace("+00:00", "Z")
_NEVER = "2318-12-31T23:59:59Z"
"""When a model expires that stays loaded."""
_SUFFIX = re.compile(r"(For[A-Z]\w*|Model|LMHeadModel)$")
_GGUF = re.compile(r"I?Q\d|TQ\d|F16|F32|BF16|MXFP4")
"""How GGUF files name a tensor's type."""
_PENALTY = {"repetition_penalty": "repeat_penalty"}
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


class OllamaNamedRequest(ModelRequest):
    """A request about a model. Clients in Go send every field that they know, if only empty."""

    name: Name | None = None
    """Old name of `model`."""
    verbose: bool = False
    """Changes nothing: tokens and tensors are not listed."""
    stream: bool = True
    """Changes nothing: the answer is one line."""
    insecure: bool = False
    """Changes nothing: nothing is downloaded."""
    username: Name = ""
    """Changes nothing: nothing is downloaded."""
    password: Name = ""
    """Changes nothing: nothing is downloaded."""
    system: Annotated[str, only("")] = ""
    """Not supported."""
    template: Annotated[str, only("")] = ""
    """Templates in Go are not supported."""
    options: Annotated[dict[str, Any], AtMost(MAX_FIELDS)] | None = None
    """Changes nothing: the model's own parameters are shown."""

    @model_validator(mode="after")
    def _check_name(self) -> "OllamaNamedRequest":
        self.model = self.model or self.name
        if not self.model:
            raise InvalidRequestError("model is missing", param="model")
        return self


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `family` is the architecture of the checkpoint."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model.

    Attributes:
        modified_at: when the server began to serve it.
        size: bytes of its weights.
        digest: of its name and sizes, not of its weights.
        capabilities: "completion", "tools", "thinking" and "embedding", as its chat template has
            them.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]
    context_length: int


class OllamaModels(msgspec.Struct, frozen=True):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel, frozen=True, kw_only=True):
    """Attributes:
    size: bytes of weights and cache.
    size_vram: of these, on a GPU.
    expires_at: a time far away.
    """

    expires_at: str = _NEVER
    size_vram: int


class OllamaRunningModels(msgspec.Struct, frozen=True):
    models: list[OllamaRunningModel]


class OllamaShown(msgspec.Struct, frozen=True, kw_only=True):
    """A model's description.

    Attributes:
        template: the chat template, with `--enable-tokenizer-info-endpoint`.
        parameters: the model's defaults by Ollama's names, a line for each.
        model_info: key "general.architecture", "general.parameter_count", and below the
            architecture "context_length", the served one, and "embedding_length".
    """

    modelfile: str = ""
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str = _STARTED


class OllamaStatus(msgspec.Struct, frozen=True):
    status: str


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's description of itself.

    Attributes:
        default_generation_settings: key "n_ctx", and "params" with the model's defaults by
            llama-server's names.
        total_slots: requests that run at a time.
        chat_template: with `--enable-tokenizer-info-endpoint`.
    """

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str = f"legato-{__version__}"
    is_sleeping: bool = False


class DescribedModel(JobMaker):
    """Answers requests about the model, from its tokenizer and the engine's description."""

    def tags(self, _body: bytes) -> Iterator[Part | End]:
        return answered(OllamaModels([self._model(name) for name in self._names]))

    def running(self, _body: bytes) -> Iterator[Part | End]:
        info = self._info
        size = info.weight_bytes + info.cache_bytes
        size_vram = 0 if info.device == "cpu" else size
        models = [
            OllamaRunningModel(
                **{**msgspec.structs.asdict(self._model(name)), "size": size}, size_vram=size_vram
            )
            for name in self._names
        ]
        return answered(OllamaRunningModels(models))

    def show(self, body: bytes) -> Iterator[Part | End]:
        self._parser.parse(OllamaNamedRequest, body)
        info, family = self._info, self._family
        shown = OllamaShown(
            parameters="\n".join(
                f"{name} {value}" for name, value in self._parameters("num_predict").items()
            ),
            template=self._template,
            details=self._details,
            model_info={
                "general.architecture": family,
                "general.parameter_count": info.num_parameters,
                "general.basename": info.served_model_name,
                f"{family}.context_length": info.max_model_len,
                f"{family}.embedding_length": info.hidden_size,
            },
            capabilities=self._capabilities,
        )
        return answered(shown)

    def pull(self, body: bytes) -> Iterator[Part | End]:
        """Answer that the model is present.

        Raises:
            ApiError: it is another one.
        """
        try:
            self._parser.parse(OllamaNamedRequest, body)
        except ApiError as error:
            raise invalid_request(f"this server downloads nothing: {error}") from None
        return answered(OllamaStatus("success"))

    def props(self, _body: bytes) -> Iterator[Part | End]:
        info, special = self._info, self._tokenizer.info
        return answered(
            LlamaProps(
                default_generation_settings={
                    "n_ctx": info.max_model_len,
                    "params": {"n_predict": -1, **self._parameters("n_predict")},
                },
                total_slots=info.scheduler.max_num_seqs or 1,
                model_alias=info.served_model_name,
                model_path=info.model,
                modalities={"vision": False, "audio": False},
                chat_template=self._template,
                bos_token=_token_text(special.get("bos_token")),
                eos_token=_token_text(special.get("eos_token")),
            )
        )

    def _parameters(self, limit_name: str) -> dict[str, float | int]:
        """Return what requests begin with. Args: limit_name: of the most tokens to generate."""
        told = {_PENALTY.get(name, name): value for name, value in self._defaults.sampling.items()}
        return told if self._default_limit is None else {**told, limit_name: self._default_limit}

    @property
    def _names(self) -> tuple[str, ...]:
        return self._info.served_model_names

    @property
    def _family(self) -> str:
        return _SUFFIX.sub("", self._info.architecture).lower() or "unknown"

    @property
    def _template(self) -> str:
        return self._prompts.template_text() if self._parser.serving.shows_template else ""

    @property
    def _capabilities(self) -> list[str]:
        if not self._info.generates:
            return ["embedding"]
        return ["completion", *self._prompts.abilities()]

    @property
    def _details(self) -> OllamaDetails:
        info = self._info
        return OllamaDetails(
            format="gguf" if _GGUF.match(info.quantization) else "safetensors",
            family=self._family,
            families=[self._family],
            parameter_size=_short(info.num_parameters),
            quantization_level=info.quantization,
        )

    def _model(self, name: str) -> OllamaModel:
        info = self._info
        sizes = f"{name} {self._family} {info.num_parameters} {info.weight_bytes}"
        return OllamaModel(
            name=name,
            model=name,
            modified_at=_STARTED,
            size=info.weight_bytes,
            digest=hashlib.sha256(sizes.encode()).hexdigest(),
            details=self._details,
            capabilities=self._capabilities,
            context_length=info.max_model_len,
        )


def _short(count: int) -> str:
    """Return a number of parameters as model cards write it."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""
