"""Log probabilities in three formats: chat's, completions' and vLLM's.

A long prompt's are megabytes: each position becomes JSON only when it is written.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from legato.api.http.json_text import array, encode_json
from legato.core.outputs import TokenLogprobs, TokenScores, entries_of
from legato.core.vocabulary import Vocabulary
from legato.language.output_text import Detokenizer

# JSON has no infinity.
_LOWEST = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    """Attributes: `bytes` are the token's own, needed if `token` is no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's format in chat completions."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's format in completions: parallel lists, one entry a token.

    Attributes:
        token_logprobs: None for the first token of a prompt, which nothing predicts.
        top_logprobs: key the token's text; holds the token itself too, if it is not at the top.
        text_offset: where the token begins, in characters of the choice's text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# vLLM's format for prompts: None for the first token; key the token id as a string.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class LogprobsWriter:
    """Writes the log probabilities of one request's answer in JSON, token by token.

    It caches the JSON of each token's text and bytes, since tokens recur.

    Args:
        names_by_id: write "token_id:5" in place of a token's text, as vLLM does.
    """

    def __init__(self, vocabulary: Vocabulary, *, names_by_id: bool = False) -> None:
        self.vocabulary = vocabulary
        self._names_by_id = names_by_id
        self._texts: dict[int, bytes] = {}  # key: token id
        self._bytes: dict[int, bytes] = {}  # key: token id

    def text(self, token_id: int) -> bytes:
        """Return a token's text."""
        text = self._texts.get(token_id)
        if text is None:
            data = self.vocabulary.token_bytes(token_id)
            text = self._texts[token_id] = encode_json(data.decode(errors="replace"))
        return text

    def name(self, token_id: int) -> bytes:
        """Return a token's text, or its id in words."""
        return b'"token_id:%d"' % token_id if self._names_by_id else self.text(token_id)

    def chat(self, entries: Iterable[TokenLogprobs] | None) -> ChatLogprobs | None:
        """Return an entry for each token, with as many alternatives as the request asked for."""
        return None if entries is None else ChatLogprobs(array(map(self._chat_entry, entries)))

    def chat_entries(self, entries: Iterable[TokenLogprobs]) -> list[Any]:
        """Return the entries as JSON; each stands for a `TokenLogprob`."""
        return [msgspec.Raw(self._chat_entry(entry)) for entry in entries]

    def prompt(self, scored: Sequence[TokenScores], num_top: int | None = None) -> Iterator[bytes]:
        """Yield the items of a `PromptLogprobs`.

        Args:
            scored: the tokens from the second on.
            num_top: how many alternatives to show; None shows all.
        """
        yield b"null"
        yield from (self._prompt_entry(entry, num_top) for entry in entries_of(scored))

    def _chat_entry(self, entry: TokenLogprobs) -> bytes:
        top = b",".join([self._chat_token(*pair) + b"}" for pair in entry.top])
        token = self._chat_token(entry.token_id, entry.logprob)
        return b'%b,"top_logprobs":[%b]}' % (token, top)

    def _chat_token(self, token_id: int, logprob: float) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            token_bytes = list(self.vocabulary.token_bytes(token_id))
            data = self._bytes[token_id] = encode_json(token_bytes)
        text = self.name(token_id)
        return b'{"token":%b,"logprob":%b,"bytes":%b' % (text, number(logprob), data)

    def _prompt_entry(self, entry: TokenLogprobs, num_top: int | None) -> bytes:
        ranked = [(*pair, rank) for rank, pair in enumerate(entry.top[:num_top], start=1)]
        scores = {
            token_id: b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
            % (token_id, number(logprob), rank, self.text(token_id))
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }
        return b"{%b}" % b",".join(scores.values())


class LogprobColumns(NamedTuple):
    """The items of a `CompletionLogprobs`' lists, in JSON."""

    tokens: Iterable[bytes]
    token_logprobs: Iterable[bytes]
    top_logprobs: Iterable[bytes]
    text_offset: Iterable[bytes]

    def each(self, change: Callable[[Iterable[bytes]], Iterable[bytes]]) -> "LogprobColumns":
        """Apply a change to each list's items."""
        return LogprobColumns(*[change(items) for items in self])

    @classmethod
    def joined(cls, *parts: "LogprobColumns") -> CompletionLogprobs:
        """Join the lists of several parts, in order."""
        return CompletionLogprobs(
            *(array(chain.from_iterable(lists)) for lists in zip(*parts, strict=True))
        )


class CompletionLogprobsWriter:
    """Writes the log probabilities of one text, piece by piece.

    Args:
        num_top: how many alternatives to show.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, writer: LogprobsWriter, *, num_top: int, skip_special_tokens: bool) -> None:
        self._writer = writer
        self._num_top = num_top
        self._offset = 0
        self._detokenizer = Detokenizer(writer.vocabulary, skip_special_tokens=skip_special_tokens)

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the entries of the next tokens; the result must be written exactly once."""
        return LogprobColumns.joined(self._columns(entries))

    def _columns(self, entries: Sequence[TokenLogprobs]) -> LogprobColumns:
        return LogprobColumns(
            (self._writer.name(entry.token_id) for entry in entries),
            (number(entry.logprob) for entry in entries),
            (self._top(entry) for entry in entries),
            (self._advance(entry.token_id) for entry in entries),
        )

    def columns_of_one(self, entries: Sequence[TokenLogprobs]) -> LogprobColumns:
        """Return the entries of one of several texts that follow the same prompt."""
        return self._columns(entries)._replace(text_offset=self._offsets_of_one(entries))

    def prompt_columns(
        self,
        token_ids: Sequence[int],
        scored: Sequence[TokenScores],
        echoed: str,
        starts: Sequence[int],
    ) -> LogprobColumns:
        """Return a prompt's entries.

        Args:
            scored: its tokens from the second on.
            echoed: its text, which the completion follows.
            starts: where each token begins in that text; empty if it was decoded from the tokens.
        """
        self._offset = len(echoed)
        null = [b"null"]
        return LogprobColumns(
            map(self._writer.name, token_ids),
            chain(null, (number(entry.logprob) for entry in entries_of(scored))),
            chain(null, (self._top(entry) for entry in entries_of(scored))),
            (b"%d" % start for start in starts or self._decoded_starts(token_ids, echoed)),
        )

    def _decoded_starts(self, token_ids: Sequence[int], echoed: str) -> Iterator[int]:
        """Yield where each token begins in a decoded text, whose first space may be left out."""
        detokenizer = copy.copy(self._detokenizer)
        lengths = [len(detokenizer.push(token_id)) for token_id in token_ids]
        start = min(0, len(echoed) - sum(lengths))
        for length in lengths:
            yield max(0, start)
            start += length

    def _offsets_of_one(self, entries: Sequence[TokenLogprobs]) -> Iterator[bytes]:
        own = copy.copy(self)
        own._detokenizer = copy.copy(self._detokenizer)
        yield from (own._advance(entry.token_id) for entry in entries)

    def _top(self, entry: TokenLogprobs) -> bytes:
        # Worst first: if tokens share a text, the last one stays: the best, or the sampled token.
        pairs = [*reversed(entry.top[: self._num_top]), (entry.token_id, entry.logprob)]
        texts = {self._writer.name(token_id): number(logprob) for token_id, logprob in pairs}
        return b"{%b}" % b",".join([b"%b:%b" % pair for pair in texts.items()])

    def _advance(self, token_id: int) -> bytes:
        """Return the next token's offset, and move past it."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token_id))
        return b"%d" % offset


def number(logprob: float) -> bytes:
    """Write a log probability in JSON."""
    return encode_json(max(logprob, _LOWEST))
