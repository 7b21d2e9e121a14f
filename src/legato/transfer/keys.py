"""Reads the key that the engines and routers of a fleet share."""

from pathlib import Path

from legato.core.addresses import is_loopback
from legato.core.cache_config import TransferConfig
from legato.core.errors import ConfigError

_LEAST_KEY_BYTES = 16


def read_key(config: TransferConfig) -> bytes:
    """Return the shared key; empty if none is needed.

    Raises:
        ConfigError: the key cannot be read, is too short, or is missing but needed.
    """
    if config.kv_transfer_key_file is None:
        if not is_loopback(config.kv_transfer_host):
            raise ConfigError(
                f"--kv-transfer-host {config.kv_transfer_host} can be reached from elsewhere: it "
                "needs a --kv-transfer-key-file"
            )
        return b""
    try:
        key = Path(config.kv_transfer_key_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read --kv-transfer-key-file: {error}") from error
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(f"--kv-transfer-key-file needs {_LEAST_KEY_BYTES} bytes at least")
    return key
