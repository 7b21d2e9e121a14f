"""Log probabilities in the three shapes that clients know: chat's, completions' and vLLM's."""

from collections.abc import Sequence

import msgspec

from legato.core.outputs import TokenLogprobs
from legato.engine.frontend.output_text import Detokenizer
from legato.model.vocabulary import Vocabulary

# JSON has no infinity.
_LOWEST = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    """Attributes: `bytes` are the token's own, where `token` alone is no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's shape in chat completions."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's shape in plain completions: parallel lists, one entry a token.

    Attributes:
        token_logprobs: None for the first token of a prompt, which nothing predicts.
        top_logprobs: key the token's text; holds the token itself too, if it is not at the top.
        text_offset: where the token begins, in characters of the choice's text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# vLLM's shape for prompts: None for the first token; key the token id as a string.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def chat_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprobs] | None
) -> ChatLogprobs | None:
    """One entry a token, each with as many alternatives as were asked for; None where not asked."""
    if entries is None:
        return None
    return ChatLogprobs([_chat_entry(vocabulary, entry) for entry in entries])


def prompt_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Args: entries: for the prompt's tokens from the second on."""
    return [None, *(_prompt_entry(vocabulary, entry) for entry in entries)]


class CompletionLogprobsWriter:
    """Writes one choice's log probabilities, piece by piece.

    Args:
        num_top: how many alternatives to show.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, vocabulary: Vocabulary, *, num_top: int, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._offset = 0
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[_text(self._vocabulary, entry.token_id) for entry in entries],
            token_logprobs=[_finite(entry.logprob) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=[self._advance(entry.token_id) for entry in entries],
        )

    def write_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs:
        """Args: entries: for the tokens from the second on."""
        first = CompletionLogprobs(
            tokens=[_text(self._vocabulary, token_ids[0])],
            token_logprobs=[None],
            top_logprobs=[None],
            text_offset=[self._advance(token_ids[0])],
        )
        return first + self.write(entries)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # Worst first: where tokens share a text, the best and the token itself are to be seen.
        pairs = [*reversed(entry.top[: self._num_top]), (entry.token_id, entry.logprob)]
        return {_text(self._vocabulary, token_id): _finite(value) for token_id, value in pairs}

    def _advance(self, token_id: int) -> int:
        """Offset of a token; the next one's is behind it."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token_id))
        return offset


def _chat_entry(vocabulary: Vocabulary, entry: TokenLogprobs) -> TokenLogprob:
    data = vocabulary.token_bytes(entry.token_id)
    top = [
        TopLogprob(
            _text(vocabulary, token_id), _finite(value), list(vocabulary.token_bytes(token_id))
        )
        for token_id, value in entry.top
    ]
    return TokenLogprob(_text(vocabulary, entry.token_id), _finite(entry.logprob), list(data), top)


def _prompt_entry(vocabulary: Vocabulary, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(entry.top, start=1)]
    return {
        str(token_id): PromptLogprob(_finite(value), rank, _text(vocabulary, token_id))
        for token_id, value, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    }


def _text(vocabulary: Vocabulary, token_id: int) -> str:
    return vocabulary.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
