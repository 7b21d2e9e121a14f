"""Limits access to Ray to this machine, or to holders of the cluster's token."""

import os
import secrets

from legato.core.addresses import is_loopback
from legato.core.errors import ConfigError

_TOKEN_BYTES = 32
_YES = ("1", "true")


def keep_to_this_machine() -> None:
    """Make the next Ray to start listen on the loopback interface only, with a secret token.

    Ray replaces a loopback address with another of the machine's, unless a variable says that it
    belongs to no cluster. The token that Ray itself would make lies in a file that others may read.
    Ray reads both settings when it is first imported.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(_TOKEN_BYTES)


def check_reach() -> None:
    """Raises `ConfigError` if anyone can reach this Ray node without a token."""
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode

    address = ray.util.get_node_ip_address()
    asks = get_authentication_mode() == AuthenticationMode.TOKEN
    asks |= os.environ.get("RAY_USE_TLS", "").lower() in _YES
    if not is_loopback(address) and not asks:
        raise ConfigError(
            f"Ray can be reached from elsewhere, at {address}, and runs what anybody sends it: "
            "start it with RAY_AUTH_MODE=token, or RAY_USE_TLS=1"
        )


def open_on_this_node() -> None:
    """Make Ray Serve open a replica's port only on Ray's address of this machine.

    Otherwise it opens the port on all addresses, once the replica is made. Call this in the
    replica's process.
    """
    import ray
    from ray.serve._private import replica

    address = ray.util.get_node_ip_address()
    opened = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: opened(server, f"{address}:0")
