"""Tells loopback addresses from others."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own and no other machine can reach it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
