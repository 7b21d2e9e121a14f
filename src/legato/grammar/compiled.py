"""Compiling a grammar, within bounds of time and memory that hold for each step of it, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=30_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""A few milliseconds a step and some ten megabytes a request, for what is made to take the most."""


STACK_BYTES = 32 * 2**20
"""Of threads in which grammars that have been checked are compiled and used."""
CHECK_STACK_BYTES = 4 * 2**20
"""Of the thread that checks them: what recurses too deep ends the process that does that. It holds
some 300 definitions, each of which refers to the next."""


class GrammarError(ValueError):
    """A grammar that does not compile, that nothing fits, or that takes too much."""


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, somewhere in an output.

    Attributes:
        matcher: where it is; moved by whoever uses it.
        end: the token that stands for the end of the output in masks, behind all others.
    """

    matcher: LLMatcher
    end: int

    def copied(self) -> "Grammar":
        """One that moves by itself; takes some ten microseconds."""
        return Grammar(self.matcher.deep_copy(), self.end)


@contextmanager
def raising_no_panic() -> Iterator[None]:
    """Raise a panic of Rust, which is no `Exception`, as a `RuntimeError`."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"{type(panic).__name__}: {panic}") from panic


def compile_grammar(tokenizer: LLTokenizer, source: str) -> Grammar:
    """A grammar before the first token; other threads run meanwhile.

    Args:
        source: Lark, or llguidance's JSON.

    Raises:
        GrammarError: its message is llguidance's.
    """
    try:
        with raising_no_panic():
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    except Exception as error:
        raise GrammarError(f"{type(error).__name__}: {error}") from error
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return Grammar(matcher, tokenizer.vocab_size - 1)
