"""Answers from a server with OpenAI's API, for `legato chat --url`."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import httpx

from legato.cli.conversation import AnswerPiece, Message
from legato.core.errors import ConfigError, InvalidRequestError
from legato.core.lines import LineBuffer

# An answer may wait for a long time, until others have finished.
_TIMEOUT = httpx.Timeout(10.0, read=None)
_DATA = b"data:"
_DONE = b"[DONE]"


class RemoteChat:
    """A model served at a URL.

    Args:
        url: of the server, with "/v1" or without.
        model: its name there; None means the first.
        options: further fields of the requests.

    Raises:
        ConfigError: there is no such server, or it refuses the key.
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

    def answer(self, messages: list[Message]) -> Generator[AnswerPiece]:
        """Yield the pieces of the answer; as `conversation.Answer`."""
        body = {
            **self._options,
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with _in_one_line(), self._http.stream("POST", "chat/completions", json=body) as response:
            _refuse_errors(response)
            for chunk in _events(response):
                if chunk.get("error") is not None:
                    raise InvalidRequestError(_message(chunk))
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    yield AnswerPiece(delta.get("content") or "", thought)
                if usage := chunk.get("usage"):
                    yield AnswerPiece(num_tokens=usage["completion_tokens"])

    def _first_model(self) -> str:
        with _in_one_line(), self._http.stream("GET", "models") as response:
            _refuse_errors(response)
            name: str = json.loads(response.read())["data"][0]["id"]
            return name


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Turn failures of a server into a one-line error."""
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
    """Yield the data of server-sent events, until OpenAI's end mark."""
    for line in chain.from_iterable(map(LineBuffer().feed, response.iter_bytes())):
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        if line.startswith(_DATA):
            yield json.loads(data)
    raise InvalidRequestError("the answer breaks off")


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return " ".join(str(error if isinstance(error, str) else error["message"]).split())
