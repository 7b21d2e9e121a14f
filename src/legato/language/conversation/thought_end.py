"""Thinking budgets: the tokens by which a model's family begins and ends its thoughts."""

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from legato.core.sampling_params import ThinkingLimit
from legato.language.message.message_syntax import Channels, Marks, MessageSyntax

if TYPE_CHECKING:  # as in prompt.py
    from legato.language.tokenizer.tokenizer import Tokenizer

QWEN3_MESSAGE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the "
    "thinking directly now.\n"
)
"""With which Qwen's makers end a thought of Qwen3 at its budget."""
_BEFORE_BREAKS = ("", *".,:;!?)]}`*|\"'")
_BREAKS = ("\n", "\n\n")
_MOST_SAID = 2
"""A message takes at most this part of a budget: one half. A longer one is left out."""


class ThoughtEnd(msgspec.Struct, frozen=True):
    """How a thought ends that is cut.

    Attributes:
        message: the last words of the thought; empty for none.
        after: text between the mark and the answer.
    """

    message: str = ""
    after: str = ""


class _MarkTokens(msgspec.Struct, frozen=True):
    """Attributes: as of `ThinkingLimit`; `end` ends the first thought that is cut."""

    begins: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    end: tuple[int, ...]
    end_again: tuple[int, ...]
    breaks: tuple[int, ...]


def thinking_limit(
    tokenizer: "Tokenizer",
    syntax: MessageSyntax,
    end: ThoughtEnd,
    budget: int | None,
    message: str | None = None,
) -> ThinkingLimit | None:
    """Return the limit of an answer's thinking; None if the marks are not exact tokens.

    Args:
        syntax: of the answer. With tools that may be called, harmony's next channel is free.
        end: of the family.
        budget: most tokens of thinking; None only counts them.
        message: the last words of a thought that is cut; None takes the family's.
    """
    marks = _mark_tokens(tokenizer, syntax.reasoning, syntax.channels, syntax.is_calling, end.after)
    if marks is None:
        return None
    calls = syntax.tool_calls
    said = _ids(tokenizer, end.message if message is None else message)
    if budget is not None and len(said) * _MOST_SAID > budget:
        said = ()
    return ThinkingLimit(
        budget=budget,
        begins=marks.begins,
        ends=marks.ends,
        forced=(*said, *marks.end),
        num_said=len(said),
        forced_again=marks.end_again,
        breaks=marks.breaks if budget is not None else (),
        calls=None if calls is None else _pair(tokenizer, calls.begin, calls.end),
        is_open=syntax.is_reasoning_open,
    )


def without_thought(
    prompt_ids: list[int], syntax: MessageSyntax, limit: ThinkingLimit
) -> tuple[list[int], MessageSyntax, ThinkingLimit]:
    """End a prompt's open thought if the budget is nothing, so that the answer begins at once."""
    if limit.budget != 0 or not limit.is_open:
        return prompt_ids, syntax, limit
    closed = msgspec.structs.replace(syntax, is_reasoning_open=False)
    return [*prompt_ids, *limit.forced], closed, msgspec.structs.replace(limit, is_open=False)


def _ids(tokenizer: "Tokenizer", text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()


@lru_cache(maxsize=16)
def _mark_tokens(
    tokenizer: "Tokenizer",
    reasoning: Marks | None,
    channels: Channels | None,
    is_calling: bool,
    after: str,
) -> _MarkTokens | None:
    if channels is not None:
        begin = f"{channels.channel}analysis{channels.message}"
        ends, exact = channels.ends, (channels.channel, channels.message, *channels.ends)
        next_channel = f"{channels.end}{channels.start}assistant{channels.channel}"
        end_again = f"{next_channel}final{channels.message}"
        # The model chooses between its answer and a call; a second thought ends in the answer.
        end = next_channel if is_calling else end_again
    elif reasoning is not None:
        begin, ends = reasoning.begin, (reasoning.end,)
        exact = (*ends, begin) if tokenizer.is_token(begin) else ends
        end = end_again = reasoning.end + after
    else:
        return None
    ids = [_ids(tokenizer, text) for text in exact]
    begun = _ids(tokenizer, begin)
    if any(len(one) != 1 for one in ids) or not _is_exact(tokenizer, begun, begin):
        return None
    return _MarkTokens(
        begins=(begun,),
        ends=tuple(_ids(tokenizer, text)[0] for text in ends),
        end=_ids(tokenizer, end),
        end_again=_ids(tokenizer, end_again),
        breaks=_breaks(tokenizer),
    )


def _is_exact(tokenizer: "Tokenizer", begun: tuple[int, ...], text: str) -> bool:
    """Whether a mark begins with a token that no other text has."""
    first = tokenizer.token_bytes(begun[0]).decode(errors="replace")
    return len(begun) == 1 or (len(first) > 1 and text.startswith(first) and first[0] in "<[")


def _breaks(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Return the tokens of line breaks, and of a sign and a break after it."""
    texts = (sign + line for sign in _BEFORE_BREAKS for line in _BREAKS)
    found = (_ids(tokenizer, text) for text in texts)
    return tuple(dict.fromkeys(ids[0] for ids in found if len(ids) == 1))


def _pair(tokenizer: "Tokenizer", begin: str, end: str) -> tuple[int, int] | None:
    """Return the tokens of a section's marks; None if they are no tokens."""
    ids = [_ids(tokenizer, text) for text in (begin, end)]
    if any(len(one) != 1 for one in ids):
        return None
    return ids[0][0], ids[1][0]
