"""Drafts of simulated requests, of which it is known how often they are right."""

import hashlib
from collections.abc import Iterable

import msgspec

from legato.core.errors import ConfigError
from legato.core.request import Request
from legato.core.step_record import DrafterName, StepRecord
from legato.executor.simulated import simulated_token
from legato.speculation.drafter import Draft

_MOST_DRAFTS = 64
_FEWEST_TRIALS = 20
"""Drafts from which on a chance is learned; deeper ones are taken to be never made."""
_HASH_BYTES = 6


class Acceptance(msgspec.Struct, frozen=True):
    """How often drafts are right.

    Attributes:
        chances: of a draft to be right where all before it are, by how many these are; there are
            none beyond.
        share: of a stream's steps, those in which anything is drafted.
    """

    chances: tuple[float, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not all(0.0 <= chance < 1.0 for chance in self.chances):
            raise ConfigError(f"drafts are right with a chance in [0, 1), got {max(self.chances)}")

    @classmethod
    def even(cls, chance: float) -> "Acceptance":
        """Each draft is right with the same chance, as long as those before it are."""
        return cls((chance,) * _MOST_DRAFTS)

    @classmethod
    def of_steps(cls, steps: Iterable[StepRecord]) -> "Acceptance":
        """As it was in these, of which those that drafted nothing count, too.

        Raises:
            ConfigError: there are too few drafts to tell.
        """
        tried, right = [0] * _MOST_DRAFTS, [0] * _MOST_DRAFTS
        num_verified = num_plain = 0
        for chunk in (chunk for step in steps for chunk in step.chunks):
            num_plain += chunk.kind == "decode"
            num_verified += chunk.kind == "verify"
            for depth in range(min(chunk.num_drafts, chunk.num_accepted + 1, _MOST_DRAFTS)):
                tried[depth] += 1
                right[depth] += depth < chunk.num_accepted
        known = next((d for d, count in enumerate(tried) if count < _FEWEST_TRIALS), _MOST_DRAFTS)
        if not known:
            raise ConfigError(
                f"a trace of {tried[0]} drafts does not tell how often they are right"
            )
        # Had one more been wrong, so that none is certain.
        chances = tuple(right[depth] / (tried[depth] + 1) for depth in range(known))
        return cls(chances, num_verified / (num_verified + num_plain))


class SimulatedDrafter:
    """Knows what will come, and says so as often as it is to be right.

    Whether it is does not depend on the schedule, but on the request and the position alone.
    """

    name: DrafterName = "model"

    def __init__(self, acceptance: Acceptance, vocab_size: int) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def advance(self, request: Request) -> None:
        """Nothing is learned: chances are known."""

    def propose(self, request: Request, most: int) -> Draft | None:
        chances = self._acceptance.chances[:most]
        first, name = request.num_tokens, request.request_id
        if not chances or _drawn(name, first, "is drafted") >= self._acceptance.share:
            return None
        token_ids = [
            self._guess(name, position, chance) for position, chance in enumerate(chances, first)
        ]
        return Draft(self.name, token_ids, chances)

    def forget(self, request: Request) -> None:
        """Nothing is remembered."""

    def _guess(self, request_id: str, position: int, chance: float) -> int:
        token_id = simulated_token(request_id, position, self._vocab_size)
        is_right = _drawn(request_id, position, "is right") < chance
        return token_id if is_right else (token_id + 1) % self._vocab_size


def _drawn(request_id: str, position: int, what: str) -> float:
    """A number in [0, 1), always the same of the same."""
    told = f"{request_id}:{position}:{what}".encode()
    digest = hashlib.blake2b(told, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little") / 256.0**_HASH_BYTES
