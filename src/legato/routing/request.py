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
    """

    request_id: str
    num_prompt_tokens: int
    slo: SloClass = SloClass()
    tenant: str = DEFAULT_TENANT
    block_hashes: Sequence[BlockHash] = ()
    block_size: int = 16


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
