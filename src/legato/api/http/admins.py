"""Restricts changes of settings, and watching all clients' requests, to admins."""

import ipaddress

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import Scope

from legato.api.config import ServerConfig
from legato.api.http.api_keys import ApiKeys, sent_key
from legato.api.http.errors import admin_key_required, from_this_machine_only
from legato.api.http.origins import HostNames
from legato.core.addresses import is_loopback

_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})
_PROXY_PREFIX = "x-forwarded-"


class Admins:
    """Recognizes admins by their key or, if there are no admin keys, by a local connection.

    A request that a proxy forwards does not count as local, even if the proxy is. Proxy headers can
    only take the right away, so a client gains nothing by forging them.
    """

    def __init__(self, config: ServerConfig, names: HostNames) -> None:
        self._keys = ApiKeys(config.admin_api_keys)
        self._asks_for_key = bool(config.api_keys)
        self._names = names

    def check(self, scope: Scope) -> None:
        """Raises `ApiError` if a request is not an admin's."""
        headers = Headers(scope=scope)
        if self._keys:
            sent = sent_key(headers)
            if not self._keys.find(sent)[0]:
                raise admin_key_required(is_other_sent=bool(sent))
        elif not (self._is_near(scope) and not _is_passed_on(headers) and self._is_safe(headers)):
            raise from_this_machine_only()

    def _is_near(self, scope: Scope) -> bool:
        """Whether the connection comes from this machine."""
        peer = scope.get("client")
        return peer is not None and is_loopback(_unmapped(peer[0]))

    def _is_safe(self, headers: Headers) -> bool:
        """Whether no foreign web page can have sent the request by DNS rebinding.

        If clients need a key, a page does not have it.
        """
        return self._asks_for_key or all(map(self._names.is_own, headers.getlist("Host")))


def _is_passed_on(headers: Headers) -> bool:
    return any(name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIX) for name in headers)


def _unmapped(host: str) -> str:
    """Return the IPv4 address of an IPv4-mapped IPv6 address; any other host as it is."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


async def _check(request: Request) -> None:
    admins: Admins = request.app.state.admins
    admins.check(request.scope)


ADMINS_ONLY = Depends(_check)
"""Add it to the `dependencies` of a route."""
