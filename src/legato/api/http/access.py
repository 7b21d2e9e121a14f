"""Access: API keys of clients and admins, the names of hosts, and origins of web pages.

A browser sends requests for any page. It names the page in headers that no page can forge, and
those are checked here. A client that is no browser sends none of them, and passes.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.api.config import ServerConfig
from legato.api.http.error_responses import error_response
from legato.api.http.errors import (
    admin_key_required,
    from_this_machine_only,
    host_not_allowed,
    origin_not_allowed,
)
from legato.core.addresses import is_loopback
from legato.core.tenant import TENANT_PATTERN

# A base64 key ends with up to two "=", so a name needs something else after its "=".
_NAMED = re.compile(rf"({TENANT_PATTERN.strip('^$')})=(?!=*$)(.+)", re.DOTALL)


class ApiKeys:
    """API keys as configured: KEY, or TENANT=KEY. A tenant may have several.

    It stores only their digests.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = [
            (_digest(key.encode(errors="surrogateescape")), tenant)
            for tenant, key in map(_split, keys)
        ]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def num_tenants(self) -> int:
        """Number of tenants; all keys that name none are of one."""
        return len({tenant for _, tenant in self._tenants})

    def find(self, given: bytes) -> tuple[bool, str | None]:
        """Return whether a key is valid, and its tenant, if it names one."""
        digest = _digest(given)
        # Compare all, so that the time taken reveals nothing about near misses.
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(digest, key)]
        return bool(found and given), found[0] if found else None


def sent_key(headers: Headers) -> bytes:
    """Return the key that a client sent in OpenAI's or Anthropic's header; empty if none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")  # the bytes as sent


def _split(text: str) -> tuple[str | None, str]:
    named = _NAMED.fullmatch(text)
    return (named[1], named[2]) if named else (None, text)


def _digest(key: bytes) -> bytes:
    """Hash a key. All digests have one length, so comparing them does not reveal the key's."""
    return hashlib.sha256(key).digest()


_ANY = "*"
_LOOPBACK = "localhost"
_HOST = re.compile(r"(\[[^]]+\]|[\w.-]+)(:\d*)?", re.ASCII)
_CONTAINER_DOMAINS = (".docker.internal", ".containers.internal", ".svc", ".svc.cluster.local")
"""Of Docker, Podman and Kubernetes. No stranger can own such a name: its last label is reserved, or
no top-level domain.
"""
_SAFE_METHODS = frozenset({"GET", "HEAD"})


class HostNames:
    """The names in a `Host` header that the server accepts.

    It accepts any address, since an address needs no DNS, and the names of the loopback interface,
    of `--host` and of each `--allowed-host`. If other machines can connect, it also accepts names
    that no stranger can own: this machine's, and any without a dot. Then, and if clients need a
    key, it accepts the names that containers and clusters give to machines and services.

    If clients need a key, it accepts any host unless some are allowed: a page without the key
    learns nothing under any name.
    """

    def __init__(self, config: ServerConfig) -> None:
        allowed = [host.lower() for host in config.allowed_hosts]
        self._is_any_known = _ANY in allowed or (bool(config.api_keys) and not allowed)
        self._names = {_LOOPBACK, config.host.lower(), *allowed}
        self._domains = (f".{_LOOPBACK}", *(host for host in allowed if host.startswith(".")))
        self._are_dotless_known = not is_loopback(config.host)
        self._are_containers_known = self._are_dotless_known or bool(config.api_keys)
        if self._are_dotless_known:
            own = socket.gethostname().lower()
            self._names |= {own, f"{own.partition('.')[0]}.local"}

    def __contains__(self, host: str) -> bool:
        """Args: host: with or without a port."""
        if self._is_any_known or self.is_own(host):
            return True
        name = _name(host)
        return name is not None and self._are_containers_known and name.endswith(_CONTAINER_DOMAINS)

    def is_own(self, host: str) -> bool:
        """Whether a host is one of the server's own names, regardless of other accepted ones."""
        name = _name(host)
        if name is None:
            return False
        is_known = name in self._names or name.endswith(self._domains)
        return is_known or _is_address(name) or (self._are_dotless_known and "." not in name)


class CheckHost:
    """Refuses requests to a name that is not the server's.

    The owner of a name can point it at this machine (DNS rebinding). A browser then takes pages
    loaded from that name for the server's own.
    """

    def __init__(self, app: ASGIApp, names: HostNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for host in Headers(scope=scope).getlist("Host"):
            if host not in self._names:
                await error_response(host_not_allowed(host))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class CheckOrigin:
    """Refuses requests from pages of other origins, unless allowed or following a link.

    The browser hiding the answer from the page is not enough: the request would be served (CSRF).
    """

    def __init__(self, app: ASGIApp, allowed_origins: tuple[str, ...]) -> None:
        self._app = app
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("Origin")
        is_allowed = _ANY in self._allowed_origins or origin in self._allowed_origins
        if not (is_allowed or _is_own(headers) or _is_link(scope["method"], headers)):
            await error_response(origin_not_allowed(origin))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_own(headers: Headers) -> bool:
    """Whether the request comes from the server's own page, or from no page."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None:  # also right behind a proxy that changes the host
        return site in {"same-origin", "none"}
    origin, host = headers.get("Origin"), headers.get("Host")
    # Either scheme: a proxy may speak TLS for the server.
    return origin is None or origin in {f"http://{host}", f"https://{host}"}


def _is_link(method: str, headers: Headers) -> bool:
    """Whether a browser navigates here; the page with the link does not see the answer."""
    return method in _SAFE_METHODS and headers.get("Sec-Fetch-Dest") == "document"


def _name(host: str) -> str | None:
    """Return a host without its port, in lower case; None if it is not well-formed."""
    match = _HOST.fullmatch(host.lower())
    return match[1].strip("[]").removesuffix(".") if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
