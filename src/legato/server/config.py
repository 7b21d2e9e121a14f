"""Settings of the HTTP server."""

import math
import re
from pathlib import Path

import msgspec

from legato.core.errors import ConfigError
from legato.observe.traces.tracer import trace_format

MIN_BODY_BYTES_S = 1024
"""The slowest that a body may come once its time is up."""
_ORIGIN = re.compile(r"\*|https?://[^/]+")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how to serve, and what clients may take up.

    Attributes:
        port: 0 takes a free one.
        api_keys: any of these opens the API; none at all leaves it open.
        served_model_name: the model's name in the API; None takes the one it was loaded by.
        allowed_origins: web pages of these origins may call the API from a browser; "*" stands for
            all, and none is the default.
        trust_request_chat_template: whether clients may send templates. A template is a program:
            sandboxed, but free to compute for as long as it likes.
        max_body_bytes: larger request bodies are refused.
        max_header_bytes: larger request lines and headers are refused.
        max_completions: that one request may ask for: `n` times its prompts.
        max_unread_tokens: of a completion that may wait for its client; one more ends the stream.
        max_connections: open at once; another is refused.
        keep_alive_s: how long a connection may be idle.
        header_timeout_s: how long the headers of a request may take to arrive.
        body_timeout_s: how long its body may, unless it comes at `MIN_BODY_BYTES_S` or faster.
        write_timeout_s: how long a client may read nothing of what waits for it.
        engine_timeout_s: how long the engine may say nothing while it has requests; then it is
            killed, and another one started.
        trace: file to record a trace to from the start on; its name tells the format.
        max_trace_bytes: size, before compression, at which a trace ends.
        otlp_traces_endpoint: URL to export spans to, over HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    allowed_origins: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_completions: int = 1024
    max_unread_tokens: int = 2048
    max_connections: int = 4096
    keep_alive_s: float = 60.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    engine_timeout_s: float = 300.0
    trace: str | None = None
    max_trace_bytes: int = 2**30
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name in ("max_completions", "max_unread_tokens", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "keep_alive_s",
            "header_timeout_s",
            "body_timeout_s",
            "write_timeout_s",
            "engine_timeout_s",
        ):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")

        if self.trace is not None:
            trace_format(Path(self.trace))
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"an OTLP endpoint is like http://localhost:4318/v1/traces, got {endpoint!r}"
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"an allowed origin is like https://example.com, or *, got {origin!r}"
                )

    def __repr__(self) -> str:
        """Without the keys, which must not come into a log."""
        fields = msgspec.structs.asdict(self) | {"api_keys": f"{len(self.api_keys)} keys"}
        return f"ServerConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
