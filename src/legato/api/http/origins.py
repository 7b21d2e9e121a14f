"""Checks which web pages may use the server: its own, and those of allowed origins.

A browser sends requests for any page. It names the page in headers that no page can forge, and
those are checked here. A client that is no browser sends none of them, and passes.
"""

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.api.config import ServerConfig
from legato.api.http.error_responses import error_response
from legato.api.http.errors import host_not_allowed, origin_not_allowed
from legato.core.addresses import is_loopback

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
