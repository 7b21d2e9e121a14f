"""Answers of a server that speaks OpenAI's API, for `legato chat --url`."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from legato.cli.conversation import Message
from legato.core.errors import ConfigError, InvalidRequestError

# An answer may have to wait for long, until others' are finished.
_TIMEOUT = httpx.Timeout(10.0, read=None)
_DATA = "data:"
_DONE = "[DONE]"


class RemoteChat:
    """A model behind a URL.

    Args:
        url: of the server, with "/v1" or without.
        model: its name there; None takes the first that there is.
        options: further fields of the requests.

    Raises:
        ConfigError: there is no such server, or it lets nobody in with this key.
    """

    def __init__(
        self, url: str, *, api_key: str | None, model: str | None, options: Mapping[str, Any]
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        root = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(base_url=f"{root}/v1", headers=headers, timeout=_TIMEOUT)
            self._model = model or self._first_model()
        except (InvalidRequestError, httpx.InvalidURL) as error:
            raise ConfigError(f"{root}: {error}") from error
        self._options = options

    def answer(self, messages: list[Message]) -> Generator[str]:
        """The pieces of the answer; as `conversation.Answer`."""
        body = {**self._options, "model": self._model, "messages": messages, "stream": True}
        with _in_one_line(), self._http.stream("POST", "chat/completions", json=body) as response:
            _refuse_errors(response)
            for chunk in _events(response):
                if "error" in chunk:
                    raise InvalidRequestError(_message(chunk))
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""

    def _first_model(self) -> str:
        with _in_one_line(), self._http.stream("GET", "models") as response:
            _refuse_errors(response)
            name: str = json.loads(response.read())["data"][0]["id"]
            return name


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Turn what may go wrong with a server into an error that says so."""
    try:
        yield
    except InvalidRequestError:
        raise
    except httpx.HTTPError as error:
        raise InvalidRequestError(f"no answer: {' '.join(str(error).split())}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidRequestError(f"this is no answer of OpenAI's API: {error!r}") from error


def _refuse_errors(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = response.read().decode(errors="replace")
    try:
        told = _message(json.loads(text))
    except (ValueError, LookupError, TypeError):
        told = " ".join(text.split())[:200] or response.reason_phrase
    raise InvalidRequestError(f"{response.status_code}: {told}")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, to the end that OpenAI's have."""
    for line in response.iter_lines():
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        if line.startswith(_DATA):
            yield json.loads(data)
    raise InvalidRequestError("the answer breaks off")


def _message(body: dict[str, Any]) -> str:
    return " ".join(str(body["error"]["message"]).split())
