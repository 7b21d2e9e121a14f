"""Streams of server-sent events, as OpenAI's API has them."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec

from legato.core.lines import LineBuffer
from legato_lab.simulation.record import RequestError


class Delta(msgspec.Struct, frozen=True):
    """What a chat's event adds."""

    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """Attributes: `text` is a completion's, `delta` a chat's."""

    text: str = ""
    delta: Delta = Delta()
    token_ids: list[int] | None = None

    @property
    def added(self) -> str:
        """The text that the event adds."""
        return self.text or self.delta.content or ""


class PromptDetails(msgspec.Struct, frozen=True):
    """Attributes: cached_tokens: None where the server does not tell."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """How many tokens a request had so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Of the prompt; None where the server does not tell."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class Event(msgspec.Struct, frozen=True):
    """One event of a stream. Attributes: error: what ended it, as the server wrote it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def added(self) -> str:
        """The text that it adds, of all choices."""
        return "".join(choice.added for choice in self.choices)


_decode = msgspec.json.Decoder(Event).decode


async def stream(
    http: httpx.AsyncClient, url: str, fields: Mapping[str, object]
) -> AsyncIterator[Event]:
    """Ask for a stream with its usage, and yield its events.

    Raises:
        RequestError: the server refused the request, or ended it with an error.
    """
    body = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    async with http.stream("POST", url, json=body) as response:
        if response.is_error:
            raise RequestError(f"{response.status_code}: {(await response.aread()).decode()}")
        lines = LineBuffer()
        async for chunk in response.aiter_bytes():
            for line in lines.feed(chunk):
                if not line.startswith(b"data:") or line.rstrip().endswith(b"[DONE]"):
                    continue
                event = _decode(line.removeprefix(b"data:"))
                if event.error is not None:
                    raise RequestError(event.error)
                yield event
