"""Drafts the tokens that followed the same tokens before: prompt lookup by a suffix index.

Saxena, Prompt Lookup Decoding (2023); Oliaro et al., SuffixDecoding (2024, arXiv:2411.04975). A
guess costs nothing, so each guess is compared with the token that comes, whether or not a step
computed it as a draft: the chances of guesses are always up to date.
"""

from bisect import bisect_right
from collections import OrderedDict

from legato.core.cache_salt import Salt
from legato.core.request import Request
from legato.core.step_record import DrafterName
from legato.core.token_ids import token_array
from legato.speculation.drafter import Draft
from legato.speculation.suffix_index import LENGTHS, SuffixIndex
from legato.speculation.survival import Beliefs, Luck

_KINDS = (1, 2, 3, 4, 6, 9, 17, 33)
"""Lengths of matches at which the next kind of guesses begins."""
_PRIORS = (0.1, 0.25, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
_SLICE = 8192
"""Tokens indexed at once, in a millisecond, so that no step waits for a long prompt."""
_SEPARATOR = -1
_FOLLOWED = 65
"""Most tokens that come at once; guesses are compared with all of them."""
_MOST_OWNERS = 64
_MOST_KEPT = 32_768
"""Most tokens of recent outputs per owner, 2 MB, and of one output; half are dropped when there are
more."""


_Owner = tuple[str, Salt | None]
"""Tenant and salt."""


class _Match:
    """The place in a row where a request's last tokens were found, followed token by token."""

    __slots__ = ("_index", "at", "length", "luck")

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self.at = self.length = 0
        self.luck = Luck()

    @property
    def is_lost(self) -> bool:
        """Whether no next token is known."""
        return not self.length or self._index.token_ids[self.at] == _SEPARATOR

    def look_up(self, index: SuffixIndex, request: Request, end: int) -> None:
        """Begin anew at the place that follows the tokens before `end`."""
        self._index = index
        self.at, self.length = index.find(request.token_ids, end) or (0, 0)

    def is_right(self, request: Request, end: int, beliefs: Beliefs) -> bool:
        """Whether the request's token `end - 1`, which has come, is the one after the match."""
        if self.is_lost:
            return False
        is_right = self._index.token_ids[self.at] == request.token_ids[end - 1]
        beliefs.observe(kind_of(self.length), self.luck, is_right=is_right)
        self.at += 1
        self.length += 1
        return is_right

    def propose(self, name: DrafterName, beliefs: Beliefs, most: int) -> Draft | None:
        """Return the tokens after the match, repeated at the end of the row."""
        if self.is_lost:
            return None
        guessed = self._index.token_ids[self.at : self.at + most]
        while len(guessed) < most:
            guessed += guessed[: most - len(guessed)]
        if _SEPARATOR in guessed:
            del guessed[guessed.index(_SEPARATOR) :]
        chances = [
            beliefs.chance(kind_of(self.length + depth), self.luck) for depth in range(len(guessed))
        ]
        return Draft(name, guessed, chances)


def kind_of(length: int) -> int:
    """Return the kind of a guess after a match of `length` tokens.

    Guesses after longer matches are right more often, and so are guesses after right drafts.
    """
    return bisect_right(_KINDS, length) - 1


class OwnTokens:
    """Drafts from a request's own prompt and output."""

    name: DrafterName = "own"

    def __init__(self) -> None:
        self._beliefs = Beliefs(_PRIORS)
        self._rows: dict[str, tuple[SuffixIndex, _Match]] = {}  # key request id

    def advance(self, request: Request) -> None:
        found = self._rows.get(request.request_id)
        if found is None:
            index = SuffixIndex(request.token_ids)
            found = self._rows[request.request_id] = index, _Match(index)
        index, match = found
        num_tokens = len(request.token_ids)
        if num_tokens - index.num_indexed > _SLICE:
            index.extend(index.num_indexed + _SLICE)
            return
        if num_tokens - index.num_indexed > _FOLLOWED:
            index.extend(num_tokens)
            match.look_up(index, request, num_tokens)
            return
        for end in range(index.num_indexed + 1, num_tokens + 1):
            index.extend(end)
            if not match.is_right(request, end, self._beliefs):
                match.look_up(index, request, end)

    def propose(self, request: Request, most: int) -> Draft | None:
        found = self._rows.get(request.request_id)
        if found is None:
            return None  # it was a stream before drafting was on
        index, match = found
        if index.num_indexed < len(request.token_ids):
            return None
        return match.propose(self.name, self._beliefs, most)

    def forget(self, request: Request) -> None:
        self._rows.pop(request.request_id, None)


class RecentOutputs:
    """Drafts from the last outputs of the request's tenant with the same salt.

    Drafts of other requests' tokens change only when a request's own tokens come. That reveals no
    more than the prefix cache does, and to the same requests.
    """

    name: DrafterName = "recent"

    def __init__(self) -> None:
        self._beliefs = Beliefs(_PRIORS)
        self._stores: OrderedDict[_Owner, SuffixIndex] = OrderedDict()
        self._matches: dict[str, tuple[_Match, int]] = {}
        """Key request id; value its match, and the number of tokens followed."""

    def advance(self, request: Request) -> None:
        index = self._stores.get(_owner(request))
        if index is None:
            return
        num_tokens = len(request.token_ids)
        match, num_seen = self._matches.get(request.request_id) or (_Match(index), 0)
        # The store may have got its first output after the request became a stream.
        num_seen = max(num_seen, request.num_prompt_tokens, num_tokens - _FOLLOWED)
        for end in range(num_seen + 1, num_tokens + 1):
            if not match.is_right(request, end, self._beliefs):
                match.look_up(index, request, end)
        self._matches[request.request_id] = match, num_tokens

    def propose(self, request: Request, most: int) -> Draft | None:
        found = self._matches.get(request.request_id)
        return None if found is None else found[0].propose(self.name, self._beliefs, most)

    def forget(self, request: Request) -> None:
        self._matches.pop(request.request_id, None)
        if request.num_output_tokens:
            self._keep(request)

    def _keep(self, request: Request) -> None:
        """Store the request's output, after the last tokens of its prompt."""
        owner = _owner(request)
        index = self._stores.pop(owner, None)
        if index is None or len(index.token_ids) > _MOST_KEPT:
            # Running requests go on in the old row, which no longer grows.
            kept = [] if index is None else index.token_ids[-_MOST_KEPT // 2 :]
            index = SuffixIndex(token_array(kept))
        row = index.token_ids
        start = max(request.num_prompt_tokens - LENGTHS[-1], request.num_tokens - _MOST_KEPT)
        row.extend(request.token_ids[max(0, start) :])
        row.append(_SEPARATOR)
        index.extend(len(row))
        self._stores[owner] = index
        if len(self._stores) > _MOST_OWNERS:
            self._stores.popitem(last=False)


def _owner(request: Request) -> _Owner:
    service = request.message.service
    return service.tenant, service.block_salt
