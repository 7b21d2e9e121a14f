"""Who reaches what Ray runs: nobody from elsewhere, or whoever has the cluster's token."""

import os

from legato.core.addresses import is_loopback
from legato.core.errors import ConfigError

_YES = ("1", "true")


def keep_to_this_machine() -> None:
    """Have the Ray that is started next listen on the loopback interface alone.

    Ray takes another of the machine's addresses instead of a loopback one, unless it is told that
    it is to be no cluster's. It looks for that once, when it is first imported.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def check_reach() -> None:
    """Raises `ConfigError` where this node of Ray's can be reached by whoever wants to."""
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
    """In a replica's process: have Ray Serve open its port on Ray's own address of this machine.

    It would open it on all of them, once the replica is made.
    """
    import ray
    from ray.serve._private import replica

    address = ray.util.get_node_ip_address()
    opened = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: opened(server, f"{address}:0")
