"""Reads the server-sent events of a streamed completion, decoding almost none."""

import re

import msgspec

from legato.core.lines import LineBuffer
from legato_lab.simulation.record import RequestError

# Matches events that carry a token. Within a JSON string, the quotes would be escaped.
_TOKEN = re.compile(rb'"choices":\s*\[\s*\{')
_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
_DATA = b"data:"
_DONE = b"[DONE]"


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct, frozen=True):
    """An event without a token."""

    error: msgspec.Raw | None = None
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Event).decode


class TokenStream:
    """Records when the tokens of one completion come.

    Args:
        token_times_s: gets the time of each event that carries a token, as it comes.
        token_counts: gets the number of tokens in each of these events, if every event has the
            usage so far; else 1 for each.

    Attributes:
        num_cached_tokens: of the prompt, if the server says.
    """

    def __init__(self, token_times_s: list[float], token_counts: list[int] | None = None) -> None:
        self._token_times_s = token_times_s
        self._token_counts = token_counts
        self._num_so_far = 0
        self._lines = LineBuffer()
        self._num_counted: int | None = None
        self._is_done = False
        self.num_cached_tokens: int | None = None

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Take the bytes that came at `now_s`; they may begin and end anywhere.

        Raises:
            RequestError: the server reports an error, or the bytes are not in OpenAI's format.
        """
        for line in self._lines.feed(chunk):
            if not line.startswith(_DATA):
                continue
            if _TOKEN.search(line):
                self._take_tokens(line, now_s)
            else:
                self._take_other(line.removeprefix(_DATA).strip())

    def end(self) -> int:
        """Finish after the last bytes; return the number of tokens.

        Raises:
            RequestError: the stream broke off, or had no tokens.
        """
        if not self._is_done:
            raise RequestError("the stream broke off")
        if not self._token_times_s:
            raise RequestError("the stream brought no token")
        if self._num_counted is None:
            return len(self._token_times_s)
        # Some servers end with a separate event for the finish reason.
        del self._token_times_s[self._num_counted :]
        return self._num_counted

    def _take_tokens(self, line: bytes, now_s: float) -> None:
        if self._token_counts is not None:
            told = _COUNT.search(line)
            num_so_far = self._num_so_far + 1 if told is None else int(told[1])
            count, self._num_so_far = num_so_far - self._num_so_far, num_so_far
            if not count:
                return
            self._token_counts.append(count)
        self._token_times_s.append(now_s)

    def _take_other(self, data: bytes) -> None:
        if data == _DONE:
            self._is_done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            raise RequestError(f"not an event of OpenAI's API: {data[:200]!r}") from error
        if event.error is not None:
            raise RequestError(bytes(event.error).decode(errors="replace"))
        if event.usage is not None:
            self._num_counted = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                self.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens
