"""The API keys of clients, and their tenants."""

import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers

from legato.core.tenant import TENANT_PATTERN

# A base64 key ends with up to two "=", so a name needs something else after its "=".
_NAMED = re.compile(rf"({TENANT_PATTERN.strip('^$')})=(?!=*$)(.+)", re.DOTALL)


class ApiKeys:
    """API keys as configured: KEY, or TENANT=KEY. A tenant may have several.

    It stores only their digests.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = [(_digest(_bytes(key)), tenant) for tenant, key in map(_split, keys)]

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


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _digest(key: bytes) -> bytes:
    """Hash a key. All digests have one length, so comparing them does not reveal the key's."""
    return hashlib.sha256(key).digest()
