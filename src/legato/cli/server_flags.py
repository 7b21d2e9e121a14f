"""The flags that describe the HTTP server.

As with an engine's, a flag's destination is the name of its field, in `legato.server.config`, and a
flag that is not given leaves no trace.
"""

import argparse
from pathlib import Path

from legato.cli.durations import duration_s
from legato.cli.flags import byte_size, given_fields
from legato.core.errors import ConfigError
from legato.server.config import MIN_BODY_BYTES_S, ServerConfig

_DEFAULTS = ServerConfig()


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags from which `server_config` builds a `ServerConfig`."""
    _add_server_flags(parser.add_argument_group("server", argument_default=argparse.SUPPRESS))
    _add_trace_flags(parser.add_argument_group("tracing", argument_default=argparse.SUPPRESS))
    _add_limit_flags(
        parser.add_argument_group("limits on clients", argument_default=argparse.SUPPRESS)
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server that the parsed flags describe.

    Raises:
        ConfigError: a value is out of range.
    """
    given = given_fields(args, ServerConfig)
    for name, flag in (("api_keys", "--api-key"), ("allowed_origins", "--allowed-origins")):
        if name in given:
            given[name] = _listed(given[name], flag)
    if "api_key_file" in args:
        given["api_keys"] = (*given.get("api_keys", ()), *_read_keys(args.api_key_file))
    return ServerConfig(**given)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", help=f"address to listen on ({_DEFAULTS.host})")
    group.add_argument("--port", type=int, help=f"{_DEFAULTS.port}; 0 takes a free one")
    group.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        metavar="KEY",
        help="ask clients for this key; may be repeated, or list several with commas",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="the same from a file, one key a line, so that no list of processes shows them",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: MODEL)"
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="let web pages of this origin call the API (CORS); may be repeated, or list several "
        "with commas; * is any (default: none)",
    )
    _add_timeout_flag(
        group,
        "engine",
        "how long the engine may say nothing while it has requests, before it is started again; "
        "longer than any step takes",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let clients send chat templates, which are programs that this server would run",
    )


def _add_trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="record every step and request: FILE.jsonl for `legato explain`, FILE.json for the "
        "Perfetto UI, either with .gz behind it",
    )
    group.add_argument(
        "--max-trace-size",
        dest="max_trace_bytes",
        type=byte_size,
        metavar="SIZE",
        help="before compression, at which a trace ends, one begun by POST /trace/start too "
        f"({_DEFAULTS.max_trace_bytes >> 30}G)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="export an OpenTelemetry span for each request over OTLP/HTTP, such as to "
        "http://localhost:4318/v1/traces",
    )


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-body-size",
        dest="max_body_bytes",
        type=byte_size,
        metavar="SIZE",
        help=f"largest request body ({_DEFAULTS.max_body_bytes >> 20}M)",
    )
    group.add_argument(
        "--max-header-size",
        dest="max_header_bytes",
        type=byte_size,
        metavar="SIZE",
        help=f"largest request line and headers ({_DEFAULTS.max_header_bytes >> 10}K)",
    )
    group.add_argument(
        "--max-completions",
        type=int,
        metavar="N",
        help=f"n times the prompts of one request ({_DEFAULTS.max_completions})",
    )
    group.add_argument(
        "--max-unread-tokens",
        type=int,
        metavar="TOKENS",
        help="of a completion that may wait for a client that reads too slowly; then its stream "
        f"ends ({_DEFAULTS.max_unread_tokens})",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help=f"open at once; one more is refused ({_DEFAULTS.max_connections})",
    )
    for what, text in (
        ("keep_alive", "how long a connection may be idle"),
        ("header", "how long the headers of a request may take to arrive"),
        ("body", f"and its body, unless it comes at {MIN_BODY_BYTES_S} bytes a second"),
        ("write", "how long a client may read nothing of what waits for it"),
    ):
        _add_timeout_flag(group, what, text)


def _add_timeout_flag(group: argparse._ArgumentGroup, what: str, text: str) -> None:
    field = "keep_alive_s" if what == "keep_alive" else f"{what}_timeout_s"
    group.add_argument(
        f"--timeout-{what.replace('_', '-')}",
        dest=field,
        type=duration_s,
        metavar="TIME",
        help=f"{text} ({getattr(_DEFAULTS, field):g}s)",
    )


def _listed(flags: list[str], flag: str) -> tuple[str, ...]:
    values = tuple(value for text in flags for value in text.split(",") if value)
    if not values:
        raise ConfigError(f"{flag} is empty")
    return values


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        keys = tuple(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key")
    return keys
