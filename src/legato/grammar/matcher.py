"""Compiles grammars, with limits of time and memory that also hold for each step."""

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
"""At most a few milliseconds a step and some ten megabytes a request, for the worst grammars."""


STACK_BYTES = 32 * 2**20
"""Stack of threads that compile and use checked grammars."""
CHECK_STACK_BYTES = 4 * 2**20
"""Stack of the thread that checks grammars: recursion beyond it ends the process. It is enough for
some 300 definitions that each refer to the next."""


class GrammarError(ValueError):
    """A grammar does not compile, has no output, or takes too much time or memory."""


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar at some position in an output.

    Attributes:
        matcher: the position; its user moves it.
        end: the token that stands for the end of the output in masks, after all others.
    """

    matcher: LLMatcher
    end: int

    def copied(self) -> "Grammar":
        """Return a copy that moves independently; takes some ten microseconds."""
        return Grammar(self.matcher.deep_copy(), self.end)


@contextmanager
def raising_no_panic() -> Iterator[None]:
    """Raise a panic of Rust as a `RuntimeError`; the panic itself is no `Exception`."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"{type(panic).__name__}: {panic}") from panic


def compile_grammar(tokenizer: LLTokenizer, source: str) -> Grammar:
    """Compile a grammar, before its first token; other threads run meanwhile.

    Args:
        source: Lark, or llguidance's JSON.

    Raises:
        GrammarError: with llguidance's message.
    """
    try:
        with raising_no_panic():
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    except Exception as error:
        raise GrammarError(f"{type(error).__name__}: {error}") from error
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return Grammar(matcher, tokenizer.vocab_size - 1)
