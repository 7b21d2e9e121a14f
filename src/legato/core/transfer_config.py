"""Settings of the transfer of KV blocks between engines."""

from typing import Annotated, Literal

import msgspec

from legato.core.addresses import is_loopback
from legato.core.config_fields import Config, Flag
from legato.core.errors import ConfigError
from legato.core.ranges import Seconds

KVRole = Literal["prefill", "decode", "both"]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class TransferConfig(Config, frozen=True, kw_only=True):
    """Transfer of blocks between engines."""

    flag_group = "prefill and decode apart"

    kv_role: Annotated[
        KVRole | None,
        Flag(
            "what this engine does beside other requests: computes prompts for engines that decode "
            "them, decodes what others have prefilled, or both, as kv_transfer_params asks",
            default="neither",
        ),
    ] = None
    kv_transfer_host: Annotated[
        str,
        Flag("address that engines which decode reach this one at", metavar="ADDRESS"),
    ] = "127.0.0.1"
    kv_transfer_port: Annotated[Port, Flag("port for these")] = 5600
    kv_transfer_key_file: Annotated[
        str | None,
        Flag(
            "file with the key that all engines and routers of a fleet share; needed wherever the "
            "address is not the machine's own",
            metavar="FILE",
        ),
    ] = None
    kv_transfer_peers: Annotated[
        tuple[str, ...],
        Flag(
            "engines on this machine that prompts may be fetched from where there is no key",
            metavar="HOST:PORT,...",
        ),
    ] = ("127.0.0.1:5600",)
    kv_lease_s: Annotated[
        Seconds,
        Flag(
            "how long a prefilled prompt is kept for an engine that does not ask for it, and how "
            "long one may take to answer before its prompt is computed here"
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for peer in self.kv_transfer_peers:
            host, _, port = peer.rpartition(":")
            is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
            if not (is_port and is_loopback(host.strip("[]"))):
                raise ConfigError(
                    f"kv_transfer_peers are HOST:PORT on this machine, got {peer!r}; engines on "
                    "others share a --kv-transfer-key-file"
                )

    @property
    def listening_port(self) -> int | None:
        """Port on which other engines ask for blocks; None if this engine only fetches."""
        return None if self.kv_role == "decode" else self.kv_transfer_port
