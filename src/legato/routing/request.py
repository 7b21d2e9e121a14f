"""What a router is asked, and what it answers."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from legato.core.block_hash import BlockHash
from legato.core.slo import SloClass
from legato.core.tenant import DEFAULT_TENANT

Role = Literal["both", "prefill", "decode"]
"""What a replica does of a request."""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as it matters where it goes.

    Attributes:
        slo: what it is promised.
        block_hashes: of its prompt's full blocks, from the first one on; empty where they are not
            asked for.
        block_size: tokens of each.
        is_divisible: whether its prompt may be computed by another replica than continues it.
    """

    request_id: str
    num_prompt_tokens: int
    slo: SloClass = SloClass()
    tenant: str = DEFAULT_TENANT
    block_hashes: Sequence[BlockHash] = ()
    block_size: int = 16
    is_divisible: bool = True

    @property
    def num_handed_tokens(self) -> int:
        """Of its prompt, as many as one replica can have of another: those of whole blocks, and
        not the last token, which is computed where it is continued."""
        if not self.is_divisible:
            return 0
        return (self.num_prompt_tokens - 1) // self.block_size * self.block_size


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request is served.

    Attributes:
        prefill: the replica that computes its prompt for the other; None where that does both.
        decode: the one that sends its tokens.
    """

    prefill: str | None
    decode: str

    @property
    def first(self) -> str:
        """Where it is sent first."""
        return self.prefill or self.decode
