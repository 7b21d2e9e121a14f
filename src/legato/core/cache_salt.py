"""Salts of cached blocks: only prompts with equal salts share them."""

import hashlib

from legato.core.block_hash import ROOT, BlockHash

Salt = bytes
_OWNER = b"\xff"
"""Not a byte of UTF-8, so no salt of a client looks like one with an owner."""


def cache_salt(owner: str | None, given: str | None) -> Salt | None:
    """Return the salt of a request's blocks; None if it shares them with all that have none.

    Args:
        owner: the tenant that alone shares them; None for all tenants.
        given: the client's own salt.
    """
    if owner is None:
        return None if given is None else given.encode()
    own = b"" if given is None else _OWNER + given.encode()
    return _OWNER + owner.encode() + _OWNER + own


def hash_root(salt: Salt | None) -> BlockHash | None:
    """Return the hash that a prompt's first block follows; None if its blocks are private.

    A client's own salt makes blocks private. The blocks of a tenant have a root of their own, so
    that a router finds them for that tenant alone.
    """
    if salt is None:
        return ROOT
    if not salt.startswith(_OWNER) or salt.index(_OWNER, 1) != len(salt) - 1:
        return None
    return hashlib.sha256(ROOT + salt).digest()
