"""Which addresses lead to this machine alone."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, and no other machine's way to it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
