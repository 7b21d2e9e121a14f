"""A router's input and output: requests and placements."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from legato.core.block_hash import BlockHash
from legato.core.slo import SloClass
from legato.core.tenant import DEFAULT_TENANT

Role = Literal["both", "prefill", "decode"]
"""The part of a request that a replica serves."""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that decide where it goes.

    Attributes:
        slo: its promise.
        block_hashes: of its prompt's full blocks, from the first one on; empty if the router does
            not need them.
        block_size: tokens of a block.
        is_divisible: whether one replica may compute its prompt and another continue it.
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
        """Prompt tokens that one replica can take over from another: those of whole blocks.

        The last token is not among them: the replica that continues the request computes it.
        """
        if not self.is_divisible:
            return 0
        return (self.num_prompt_tokens - 1) // self.block_size * self.block_size


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that serve a request.

    Attributes:
        prefill: the replica that only computes its prompt; None if `decode` does both.
        decode: the replica that sends its tokens.
    """

    prefill: str | None
    decode: str

    @property
    def first(self) -> str:
        """The replica that gets the request first."""
        return self.prefill or self.decode
