"""Drafts of simulated requests, with a known chance of acceptance."""

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
"""The fewest drafts from which to learn a chance; deeper drafts count as never made."""
_HASH_BYTES = 6


class Acceptance(msgspec.Struct, frozen=True):
    """How often drafts are accepted.

    Attributes:
        chances: of each draft to be accepted if all before it are, by its place; there are no
            drafts beyond.
        share: of a stream's steps that have drafts.
    """

    chances: tuple[float, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not all(0.0 <= chance < 1.0 for chance in self.chances):
            raise ConfigError(f"drafts are right with a chance in [0, 1), got {max(self.chances)}")

    @classmethod
    def even(cls, chance: float) -> "Acceptance":
        """Give each draft the same chance, if those before it are accepted."""
        return cls((chance,) * _MOST_DRAFTS)

    @classmethod
    def of_steps(cls, steps: Iterable[StepRecord]) -> "Acceptance":
        """Measure acceptance in these steps; steps without drafts count too.

        Raises:
            ConfigError: there are too few drafts.
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
        # As if one more had been rejected, so that none is certain.
        chances = tuple(right[depth] / (tried[depth] + 1) for depth in range(known))
        return cls(chances, num_verified / (num_verified + num_plain))


class SimulatedDrafter:
    """Knows the next tokens, and drafts them right with the given chances.

    Whether a draft is right depends only on the request and the position, not on the schedule.
    """

    name: DrafterName = "model"

    def __init__(self, acceptance: Acceptance, vocab_size: int) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def advance(self, request: Request) -> None:
        """Nothing to learn: the chances are given."""

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
        """Nothing to forget."""

    def _guess(self, request_id: str, position: int, chance: float) -> int:
        token_id = simulated_token(request_id, position, self._vocab_size)
        is_right = _drawn(request_id, position, "is right") < chance
        return token_id if is_right else (token_id + 1) % self._vocab_size


def _drawn(request_id: str, position: int, what: str) -> float:
    """Return a number in [0, 1), always the same for the same arguments."""
    told = f"{request_id}:{position}:{what}".encode()
    digest = hashlib.blake2b(told, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little") / 256.0**_HASH_BYTES
