"""Settings of the HTTP server."""

import msgspec

from legato.core.errors import ConfigError


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how to serve.

    Attributes:
        port: 0 takes a free one.
        api_keys: any of these opens the API; none at all leaves it open.
        served_model_name: the model's name in the API; None takes the one it was loaded by.
        max_body_bytes: larger request bodies are refused.
        trust_request_chat_template: whether clients may send templates. A template is a program:
            sandboxed, but free to compute for as long as it likes.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_body_bytes: int = 32 * 2**20
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
