"""The keys that clients may call with, and whose each is."""

import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers

from legato.core.tenant import TENANT_PATTERN

# A key of base64 ends with up to two of the characters that stand behind a name.
_NAMED = re.compile(rf"({TENANT_PATTERN.strip('^$')})=(?!=*$)(.+)", re.DOTALL)


class ApiKeys:
    """Keys as configured: KEY, or TENANT=KEY. Several may be one tenant's.

    It keeps no key itself.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = [(_digest(_bytes(key)), tenant) for tenant, key in map(_split, keys)]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def find(self, given: bytes) -> tuple[bool, str | None]:
        """Whether it is a key, and the tenant that it names, if it does."""
        digest = _digest(given)
        # All are compared, so that the time taken tells nothing of which came near.
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(digest, key)]
        return bool(found and given), found[0] if found else None


def sent_key(headers: Headers) -> bytes:
    """The key that a client sent, as OpenAI's clients do or as Anthropic's; empty where none is."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1")  # the bytes as they were sent


def _split(text: str) -> tuple[str | None, str]:
    named = _NAMED.fullmatch(text)
    return (named[1], named[2]) if named else (None, text)


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _digest(key: bytes) -> bytes:
    """Of one length whatever the key's, which the time of a comparison would tell."""
    return hashlib.sha256(key).digest()
