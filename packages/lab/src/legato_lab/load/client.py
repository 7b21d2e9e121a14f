"""An HTTP client light enough to share two cores with the server that it measures."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import httpx
import msgspec

from legato.core.errors import ConfigError
from legato_lab.load.token_stream import TokenStream
from legato_lab.simulation.record import RefusedError, RequestError

_TIMEOUT = httpx.Timeout(600.0, connect=60.0)  # between two bytes
_NO_LIMITS = httpx.Limits(max_connections=None)
_SHOWN_CHARS = 300


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server's address.

    Attributes:
        base_url: with or without "/v1".
        model: its name there; None means the only one.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """A model as its server describes it.

    Attributes:
        max_model_len: longest prompt plus output in tokens; None if the server does not say.
        vocab_size: its token ids are below this; None if the server does not say.
    """

    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _Meta(msgspec.Struct, frozen=True):
    """llama.cpp's description of a model."""

    n_vocab: int | None = None


class _ModelCard(msgspec.Struct, frozen=True):
    """Attributes: `max_model_len` is vLLM's and Legato's, `vocab_size` Legato's."""

    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    meta: _Meta | None = None

    @property
    def model(self) -> ServedModel:
        n_vocab = self.meta.n_vocab if self.meta else None
        return ServedModel(self.id, self.max_model_len, self.vocab_size or n_vocab)


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_ModelCard]


class Completed(NamedTuple):
    """The result of a stream.

    Attributes:
        num_tokens: by the server's count, if it has one.
        num_cached_tokens: of the prompt; None if the server does not say.
    """

    num_tokens: int
    num_cached_tokens: int | None


class Client:
    """A client of an OpenAI-compatible server; made by `connect`."""

    def __init__(self, http: httpx.AsyncClient, model: ServedModel) -> None:
        self._http = http
        self.model = model

    async def complete(
        self,
        prompt: list[int],
        num_tokens: int,
        token_times_s: list[float],
        extensions: Mapping[str, object] | None = None,
        *,
        token_counts: list[int] | None = None,
    ) -> Completed:
        """Stream one completion, greedily and past any end of sequence.

        Args:
            token_times_s: gets `time.perf_counter()` as each token comes, or several at once.
            extensions: further fields of the request's body.
            token_counts: gets the number of tokens each time, by the server's count if it has one.

        Raises:
            RefusedError: the server refused the request.
            RequestError: the server did not finish it.
        """
        usage = {"include_usage": True}
        if token_counts is not None:
            usage["continuous_usage_stats"] = True
        body = {
            "model": self.model.id,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": usage,
            **(extensions or {}),
        }
        stream = TokenStream(token_times_s, token_counts)
        try:
            async with self._http.stream(
                "POST", "/v1/completions", content=msgspec.json.encode(body)
            ) as response:
                await _check_status(response)
                async for chunk in response.aiter_raw():
                    stream.feed(chunk, time.perf_counter())
        except httpx.HTTPError as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error
        return Completed(stream.end(), stream.num_cached_tokens)


@asynccontextmanager
async def connect(address: Address) -> AsyncIterator[Client]:
    """Connect to a running server.

    Raises:
        ConfigError: it does not answer, or does not serve the model.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if address.api_key is not None:
        headers["Authorization"] = f"Bearer {address.api_key}"
    async with httpx.AsyncClient(
        base_url=_base_url(address), headers=headers, timeout=_TIMEOUT, limits=_NO_LIMITS
    ) as http:
        yield Client(http, await _find_model(http, address))


def _base_url(address: Address) -> httpx.URL:
    try:
        return httpx.URL(address.base_url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{address.base_url!r} is not a URL: {error}") from error


async def _find_model(http: httpx.AsyncClient, address: Address) -> ServedModel:
    try:
        response = await http.get("/v1/models")
        await _check_status(response)
        cards = msgspec.json.decode(response.content, type=_ModelList).data
    except (httpx.HTTPError, RequestError, msgspec.DecodeError) as error:
        raise ConfigError(f"no OpenAI-compatible server at {address.base_url}: {error}") from error
    models = [card.model for card in cards]
    found = [model for model in models if address.model in (None, model.id)]
    if len(found) != 1:
        names = ", ".join(model.id for model in models)
        raise ConfigError(f"name one of the models at {address.base_url}: {names}")
    return found[0]


async def _check_status(response: httpx.Response) -> None:
    if response.status_code == HTTPStatus.OK:
        return
    text = (await response.aread()).decode(errors="replace")[:_SHOWN_CHARS]
    message = f"{response.status_code}: {text}"
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        raise RefusedError(message, _retry_after_s(response))
    raise RequestError(message)


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None  # missing, or a date
