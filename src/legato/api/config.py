"""Settings of the HTTP server."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from legato.core.config_fields import Config, Flag
from legato.core.errors import ConfigError
from legato.core.ranges import Count, Seconds, Size
from legato.language.conversation.guard import MessageSpecialTokens
from legato.observe.metrics.prefix import MetricsPrefix
from legato.observe.traces.tracer import trace_format

MIN_BODY_BYTES_S = 1024
"""The slowest rate accepted for a body that exceeds its time limit."""

_tracing = partial(Flag, group="tracing")
_limit = partial(Flag, group="limits on clients")
_routing = partial(Flag, group="routers")

UnknownFields = Literal["refuse", "ignore"]
ModelName = Annotated[str, msgspec.Meta(min_length=1)]
TokenBudget = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
"""As of llama-server: -1 is no limit."""
OllamaVersion = Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+\.\d+$")]
"""Digits only: clients parse each part."""

_ORIGIN = re.compile(r"\*|https?://[^/]+")
_NEAR = re.compile(r"ipc://.+|tcp://127(\.\d{1,3}){3}:(\d{1,5}|\*)", re.ASCII)
_HOST = re.compile(r"\*|\.?[\w-]+(\.[\w-]+)*", re.ASCII)


class ServerConfig(Config, frozen=True, kw_only=True):
    """The server's address, endpoints and limits on clients."""

    flag_group = "server"

    host: Annotated[str, Flag("address to listen on")] = "127.0.0.1"
    port: Annotated[
        int,
        msgspec.Meta(ge=0, lt=2**16),
        Flag("port to listen on; 0 takes a free one", metavar="PORT"),
    ] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "ask clients for this key; TENANT=KEY makes its clients that tenant; may be repeated, "
            "or list several with commas",
            metavar="KEY",
            default="the API is open",
            name="api-key",
        ),
    ] = ()
    share_cache_between_tenants: Annotated[
        bool,
        Flag(
            "let the tenants of API keys share cached prompts; the speed of an answer then tells "
            "a tenant what another one has sent"
        ),
    ] = False
    admin_api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "key for all endpoints and for changing settings, recording traces and watching all "
            "requests on the dashboard; may be repeated, or list several with commas",
            metavar="KEY",
            default="clients on this machine may",
            name="admin-api-key",
        ),
    ] = ()
    served_model_names: Annotated[
        tuple[ModelName, ...],
        Flag(
            "the model's name in the API, or several, the first for answers; with '*', requests "
            "may use any name",
            metavar="NAME",
            default="what it was loaded by",
            name="served-model-name",
            is_spaced=True,
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag(
            "name of the server that clients may use; .example.com is all names below "
            "example.com, * any; may be repeated, or list several with commas",
            metavar="NAME",
            default="addresses and names of this machine, and any name behind a key",
            name="allowed-host",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Flag(
            "let web pages of this origin use the server (CORS); may be repeated, or list several "
            "with commas; * is any",
            metavar="ORIGIN",
            default="none",
        ),
    ] = ()
    metrics_prefix: Annotated[
        MetricsPrefix,
        Flag("prefix of metrics that vLLM has, too: with vllm, its own dashboards show them"),
    ] = "legato"
    timeout_drain_s: Annotated[
        Seconds | None,
        Flag(
            "how long running requests may continue when the server stops; then they end with an "
            "error",
            default="as long as they take",
        ),
    ] = None
    timeout_engine_s: Annotated[
        Seconds,
        Flag(
            "how long a step may take, at least, before the engine is started again; a step may "
            "also take ten times its predicted time"
        ),
    ] = 300.0
    enable_tokenizer_info_endpoint: Annotated[
        bool, Flag("serve the tokenizer's settings and the chat template at /tokenizer_info")
    ] = False
    ollama_version: Annotated[
        OllamaVersion, Flag("version that Ollama's clients are told; some refuse an old one")
    ] = "0.13.0"
    llama_timings: Annotated[
        bool,
        Flag(
            "put llama-server's timings into all answers of chat and completions, not only into "
            "those that ask with timings_per_token"
        ),
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        Flag(
            "let clients send chat templates: programs that this server runs in a sandbox, within "
            "--timeout-prompt"
        ),
    ] = False
    message_special_tokens: Annotated[
        MessageSpecialTokens,
        Flag(
            "special tokens in the text of messages: text, special (clients can forge turns of "
            "others), or a reason to refuse the request"
        ),
    ] = "text"
    unknown_fields: Annotated[
        UnknownFields,
        Flag(
            "refuse requests with unknown fields, or ignore such fields and name them in the "
            "answer's Warning header"
        ),
    ] = "refuse"
    trace: Annotated[
        str | None,
        _tracing(
            "record every step and request: FILE.jsonl for `legato explain`, FILE.json for the "
            "Perfetto UI; either may end in .gz",
            metavar="FILE",
        ),
    ] = None
    max_trace_bytes: Annotated[
        Size, _tracing("size, before compression, at which any trace ends", name="max-trace-size")
    ] = 2**30
    otlp_traces_endpoint: Annotated[
        str | None,
        _tracing(
            "export an OpenTelemetry span for each request over OTLP/HTTP, such as to "
            "http://localhost:4318/v1/traces",
            metavar="URL",
        ),
    ] = None
    kv_events_endpoint: Annotated[
        str | None,
        _routing(
            "publish which prompts are cached, for routers, over ZeroMQ as vLLM does, at an "
            "address on this machine, such as tcp://127.0.0.1:5557 or ipc:///run/legato/kv-events",
            metavar="ADDRESS",
            default="nothing is published",
        ),
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None,
        _routing(
            "another address, where routers ask for missed events",
            metavar="ADDRESS",
            default="none: a router that connects again gets all anew",
        ),
    ] = None
    kv_events_topic: Annotated[str, _routing("topic of these events", metavar="TEXT")] = ""
    max_body_bytes: Annotated[Size, _limit("largest request body", name="max-body-size")] = (
        8 * 2**20
    )
    max_header_bytes: Annotated[
        Size, _limit("largest request line and headers", name="max-header-size")
    ] = 64 * 2**10
    max_completions: Annotated[Count, _limit("completions of one request: n times its prompts")] = (
        1024
    )
    default_max_tokens: Annotated[
        Count | None,
        _limit(
            "tokens of a completion at most, if neither its request nor the model's "
            "generation_config.json says how many",
            metavar="TOKENS",
            default="what the context holds; 16 for /v1/completions",
        ),
    ] = None
    max_output_tokens: Annotated[
        Count | None,
        _limit(
            "tokens of any completion at most; a request that asks for more gets these, and a "
            "Warning header",
            metavar="TOKENS",
            default="what the context holds",
        ),
    ] = None
    reasoning_budget: Annotated[
        TokenBudget | None,
        _limit(
            "tokens of thinking in a chat at most, if its request does not say how many; 0 for "
            "none",
            metavar="TOKENS",
            default="no limit",
        ),
    ] = None
    reasoning_budget_message: Annotated[
        str | None,
        Flag(
            "last words of a thought that a budget ends",
            metavar="TEXT",
            default="those of the model's makers, if they have any",
            may_be_empty=True,
        ),
    ] = None
    max_reasoning_budget: Annotated[
        TokenBudget | None,
        _limit("tokens of thinking in any chat at most", metavar="TOKENS", default="no limit"),
    ] = None
    max_unread_tokens: Annotated[
        Count,
        _limit(
            "tokens of a completion that may wait for a slow client; one more ends its stream",
            metavar="TOKENS",
        ),
    ] = 2048
    max_stored_responses: Annotated[
        Count, _limit("answers of /v1/responses kept for later turns")
    ] = 1024
    max_stored_bytes: Annotated[
        Size, _limit("size of these answers together", name="max-stored-size")
    ] = 64 * 2**20
    max_connections: Annotated[Count, _limit("open connections; one more is refused")] = 4096
    timeout_keep_alive_s: Annotated[Seconds, _limit("time that a connection may be idle")] = 60.0
    timeout_header_s: Annotated[Seconds, _limit("time for the headers of a request to arrive")] = (
        10.0
    )
    timeout_body_s: Annotated[
        Seconds, _limit(f"time for its body, unless {MIN_BODY_BYTES_S} bytes a second arrive")
    ] = 30.0
    timeout_prompt_s: Annotated[
        Seconds, _limit("processor time for reading one body, with chat template and tokenizer")
    ] = 10.0
    timeout_write_s: Annotated[
        Seconds, _limit("time that a client with waiting bytes may read nothing")
    ] = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None:
            trace_format(Path(self.trace))
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"an OTLP endpoint is like http://localhost:4318/v1/traces, got {endpoint!r}"
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"an allowed host is like example.com, .example.com or *, got {host!r}"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"an allowed origin is like https://example.com, or *, got {origin!r}"
                )

        self._check_kv_events()

    def _check_kv_events(self) -> None:
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None and not _NEAR.fullmatch(endpoint):
                raise ConfigError(
                    f"{name} is on this machine, such as tcp://127.0.0.1:5557 or ipc:///run/kv, "
                    f"since a client that connects learns what is in prompts; got {endpoint!r}"
                )
        is_replayed = self.kv_events_replay_endpoint is not None
        if self.kv_events_endpoint is None and (is_replayed or self.kv_events_topic):
            raise ConfigError("routers are told nothing without kv_events_endpoint")

    def __repr__(self) -> str:
        """Omits the keys, which must not reach a log."""
        fields = msgspec.structs.asdict(self)
        for name in ("api_keys", "admin_api_keys"):
            fields[name] = f"{len(fields[name])} keys"
        return f"ServerConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
