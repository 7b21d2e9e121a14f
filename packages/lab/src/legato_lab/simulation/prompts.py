"""Prompts of simulated requests: tokens that are not computed, but whose blocks may be cached."""

from itertools import count

from legato.core.token_ids import TokenIds, token_array
from legato_lab.simulation.workload import HASH_BLOCK, WorkloadRequest


class SimulatedPrompts:
    """Draws token ids: each hash id is one token id, repeated to fill its blocks.

    So equal hash ids are equal tokens. The prompt's own part is an id that no other prompt has.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # key: hash id, which may have more than 32 bits
        self._unused = count()

    def draw(self, request: WorkloadRequest) -> TokenIds:
        num_tokens = request.num_prompt_tokens
        prompt = token_array(())
        for hash_id in request.hash_ids:
            prompt += self._run(self._token(hash_id), HASH_BLOCK)
        num_own = num_tokens - len(prompt)
        if num_own > 0:
            prompt += self._run(next(self._unused), num_own)
        return prompt[:num_tokens]

    def _token(self, hash_id: int) -> int:
        token_id = self._tokens.get(hash_id)
        if token_id is None:
            token_id = self._tokens[hash_id] = next(self._unused)
        return token_id

    def _run(self, token_id: int, num_tokens: int) -> TokenIds:
        return token_array((token_id,)) * num_tokens
