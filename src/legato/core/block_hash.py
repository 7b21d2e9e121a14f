"""Hashes of cached blocks that are the same on all machines: vLLM's `sha256_cbor`.

A block's hash covers its tokens and the hash of the block before it, so it stands for all tokens
from the start of a prompt. A router that knows a prompt's tokens can compute the hashes of its
blocks, and find the servers that have them cached. The cache itself looks up no block by its hash:
equal hashes are no proof of equal tokens.
"""

import hashlib
import struct
from collections.abc import Sequence

BlockHash = bytes
"""32 bytes."""

_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0, 2, 3, 4  # CBOR's major types
_NULL = b"\xf6"


def _head(major: int, value: int) -> bytes:
    """Return the shortest head of a CBOR value (RFC 8949)."""
    kind = major << 5
    if value < 24:
        return bytes((kind | value,))
    if value < 2**8:
        return bytes((kind | 24, value))
    if value < 2**16:
        return struct.pack(">BH", kind | 25, value)
    return struct.pack(">BI", kind | 26, value)


class _Written(dict[int, bytes]):
    """Cache of token ids encoded as CBOR: few ids occur, again and again."""

    def __missing__(self, token_id: int) -> bytes:
        written = self[token_id] = _head(_UNSIGNED, token_id)
        return written


_BLOCK = _head(_ARRAY, 3) + _head(_BYTES, 32)
_TOKENS = _Written()

ROOT: BlockHash = hashlib.sha256(_head(_TEXT, 1) + b"0").digest()
"""Hash of no tokens, which all chains begin with; vLLM's if its PYTHONHASHSEED is 0."""


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of the block with these tokens after the block `parent`."""
    tokens = b"".join(map(_TOKENS.__getitem__, token_ids))
    head = _BLOCK + parent + _head(_ARRAY, len(token_ids))
    return hashlib.sha256(head + tokens + _NULL).digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, parent: BlockHash = ROOT
) -> list[BlockHash]:
    """Return the hashes of a prompt's full blocks, in order; a block that is not full has none."""
    hashes: list[BlockHash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
