"""Bodies: JSON read strictly into models that refuse what they do not know; JSON and events out."""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# Proxies must not collect what is read live.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_NULL = {"type": "null"}

encode_json = msgspec.json.Encoder().encode


class JsonRoute(APIRoute):
    """Unlike the standard parser, this one refuses NaN, and halves of characters in strings."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strict_json(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return handle_strict_json


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


class RequestModel(BaseModel):
    """A JSON object that refuses fields it does not know; null is the same as not sent.

    JSON has one kind of number: 16.0 is as good an integer as 16.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: _whole(value) for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        fields = described.get("properties", {})
        for name in fields.keys() - described.get("required", ()):
            if _NULL not in fields[name].get("anyOf", ()):
                fields[name] = {"anyOf": [fields[name], _NULL]}
        return described


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
    """A field whose other values Legato does not support; these change nothing here."""
    return _Only(allowed)


def json_response(body: msgspec.Struct) -> Response:
    return Response(encode_json(body), media_type="application/json")


def event(data: bytes) -> bytes:
    """`data` as an event; it must not contain line breaks, which JSON escapes."""
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """Sends each event the moment it comes, and closes the generator however the stream ends.

    It does not look for disconnects, as its base class would: `CancelOnDisconnect` does.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._events = events

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": HTTPStatus.OK,
            "headers": self.raw_headers,
        }
        async with aclosing(self._events):
            await send(start)
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
