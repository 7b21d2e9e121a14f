"""What streams ask: to copy from their prompts, to converse, and to go on behind random tokens.

Texts come with every Python. No prompt is asked twice: a server that remembers
recent answers would know what comes.
"""

import ast
import importlib
import inspect
import itertools
import random
import textwrap
from collections.abc import Callable, Iterator
from pydoc_data import topics
from typing import Protocol

import msgspec
import numpy as np

_LENGTHS = (36, 54, 42, 60, 48)
"""Tokens of answers, in turn: nearly all would go on for longer. Were all as long, only streams
without drafts would end at once, and have their next prompts computed at once."""

_SEED = 0
_PASSAGE_CHARS, _CODE_CHARS, _MOST_CHARS = 220, 300, 550
_RANDOM_PROMPT, _LOWEST_TOKEN, _VOCAB_SIZE = 64, 100, 49_000
_MODULES = """
    argparse ast bisect calendar cmd configparser csv datetime difflib dis doctest fileinput
    fractions ftplib getopt gettext glob gzip heapq imaplib inspect ipaddress logging mailbox
    mimetypes netrc optparse os pathlib pdb pickle pickletools platform plistlib poplib pprint
    pstats queue random sched selectors shelve shlex shutil smtplib socketserver statistics
    string subprocess tarfile tempfile threading timeit tokenize traceback typing uuid wave
    zipfile
"""

_OF_TEXT = (
    "Repeat the following text in quotation marks.",
    'Repeat the following text, with "is" changed to "was".',
)
_OF_CODE = (
    "Repeat this function, with a comment added.",
    "Extract the signature and the docstring of this function.",
)
"""What the default model, which is small, does do: it copies most of what it is given."""

_OPENINGS = (
    "What is {}?",
    "Tell me about {}.",
    "Why does {} matter?",
    "What should a beginner know about {}?",
    "How would you explain {} to a child?",
    "Write a short story about {}.",
    "What do people get wrong about {}?",
    "Write a letter to a friend about {}.",
    "What is the history of {}?",
    "What can we learn from {}?",
    "Describe {} to somebody who has never heard of it.",
    "What will {} be like in a hundred years?",
)
_SUBJECTS = """
    algebra, astronomy, baking bread, bees, bicycles, bridges, butterflies, chess, clocks, clouds,
    coffee, coral reefs, deserts, earthquakes, electricity, evolution, forests, friendship,
    gardening, glaciers, gravity, honey, jazz, languages, libraries, lighthouses, magnets, maps,
    medicine, mountains, music, oceans, painting, photography, poetry, rain, recycling, rivers,
    sailing, sleep, soil, stars, statistics, steam engines, tea, telescopes, the Moon,
    the water cycle, trains, vaccines, volcanoes, whales, wheat, windmills
"""
_NEXT = ("Why is that so?", "Give me an example of what you mean.", "Now say all of that again.")


class Chat(msgspec.Struct, frozen=True):
    """Attributes: turns: questions of one conversation, each asked behind the last one's answer,
    and how many tokens are to answer it."""

    turns: list[tuple[str, int]]


class Completion(msgspec.Struct, frozen=True):
    """Attributes: token_ids: of the prompt; seed: of the answer, at temperature 1."""

    token_ids: list[int]
    seed: int
    num_tokens: int


Asked = Chat | Completion


class Workload(Protocol):
    """What streams ask, one question after the other."""

    def stream(self, num_asked: int) -> list[Asked]:
        """Return what one stream asks; raises `ValueError` if there is not so much to ask."""
        ...


class Edits:
    """Texts and functions, to be repeated with small changes."""

    def __init__(self) -> None:
        self._texts, self._code = iter(_shuffled(_passages())), iter(_shuffled(_functions()))
        self._wanted = itertools.cycle(zip(_OF_TEXT, _OF_CODE, strict=True))
        self._questions = self._asked()
        self._lengths = itertools.cycle(_LENGTHS)

    def stream(self, num_asked: int) -> list[Asked]:
        """Raises ValueError where there are no more texts."""
        questions = list(itertools.islice(self._questions, num_asked))
        if len(questions) < num_asked:
            raise ValueError("there are not so many texts: ask for fewer rounds")
        return [Chat([(question, next(self._lengths))]) for question in questions]

    def _asked(self) -> Iterator[str]:
        for (of_text, of_code), text, code in zip(
            self._wanted, self._texts, self._code, strict=False
        ):
            yield f"{of_text}\n\n{text}"
            yield f"{of_code}\n\n```python\n{code}```"


class Conversations:
    """Some turns each, about everyday subjects."""

    def __init__(self) -> None:
        subjects = [" ".join(subject.split()) for subject in _SUBJECTS.split(",")]
        pairs = itertools.product(_OPENINGS, subjects)
        self._openings = iter(_shuffled(opening.format(subject) for opening, subject in pairs))
        self._lengths = itertools.cycle(_LENGTHS)

    def stream(self, num_asked: int) -> list[Asked]:
        """Raises ValueError where there are no more subjects; two turns at least."""
        opening = next(self._openings, None)
        if opening is None:
            raise ValueError("there are not so many subjects: ask for fewer rounds")
        following = itertools.islice(itertools.cycle(_NEXT), max(1, num_asked - 1))
        return [Chat([(question, next(self._lengths)) for question in (opening, *following)])]


class RandomTokens:
    """Prompts of random tokens, behind which anything may come."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(_SEED)
        self._seeds = itertools.count()
        self._lengths = itertools.cycle(_LENGTHS)

    def stream(self, num_asked: int) -> list[Asked]:
        return [
            Completion(self._prompt(), next(self._seeds), next(self._lengths))
            for _ in range(num_asked)
        ]

    def _prompt(self) -> list[int]:
        drawn = self._rng.integers(_LOWEST_TOKEN, _VOCAB_SIZE, _RANDOM_PROMPT)
        return [int(token) for token in drawn]


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "edits": Edits,
    "conversations": Conversations,
    "random": RandomTokens,
}
"""Key the name by which a user asks for it."""

MIXED = "mixed"
"""The workload in which the first stream of each round copies, and all others draw random tokens:
drafts gain nothing for most streams of the step."""


def _passages() -> Iterator[str]:
    """Whole sentences of the language reference, a little longer than an answer."""
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            end = text.find(". ", _PASSAGE_CHARS)
            passage = text if end < 0 else text[: end + 1]
            is_prose = passage[:1].isupper() and passage.endswith(".") and "::=" not in passage
            if is_prose and _PASSAGE_CHARS <= len(passage) <= _MOST_CHARS:
                yield passage


def _functions() -> Iterator[str]:
    """Sources of the standard library's functions that have a docstring."""
    for name in _MODULES.split():
        source = inspect.getsource(importlib.import_module(name))
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                if _CODE_CHARS <= len(code) <= _MOST_CHARS:
                    yield code


def _shuffled(texts: Iterator[str]) -> list[str]:
    """Each once, so that neighbours have little in common."""
    distinct = list(dict.fromkeys(texts))
    random.Random(_SEED).shuffle(distinct)
    return distinct
