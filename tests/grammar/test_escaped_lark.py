"""Grammars rewritten for texts in JSON: they take the same texts, as JSON spells them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from

from legato.core.errors import InvalidRequestError
from legato.language.forms.escaped_lark import escaped_lark
from tests.grammar.default_tokens import default_llguidance, default_tokenizer

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " name LF line+
name: /(.+)/
line: "+" /(.*)/ LF -> added
// "a comment"
%import common.LF
"""
_GRAMMARS = [
    PATCH,
    r'start: "a\"b\\"+ "n"?',
    r'start: ("x" | QUOTE)* "\n"' "\n" r'QUOTE: "\"" | /\\/',
    r"start: /[^a]*/",
    r"start: /(?s:.*)n/",
    r"start: /(a|)(?:\n|\t)?[\x00-\x1f\\]{0,2}/",
    r"start: /(?i:ab)c*?/ /B/i",
    r'start: " ".."~"',
    r'start: /[[a-z"]&&[^n]]+/ WS' "\n%import common.WS",
    r"start: /\w+\s\S\/\u0022?/",
    r'start: ID "=" INT' "\n%import common.CNAME -> ID\n%import common.INT",
]
_texts = st.text(st.sampled_from('abBcnux"\\/ \n\t\x01\x1f=+*1é'), max_size=7)


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(default_llguidance(), grammar_from("lark", grammar))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = default_tokenizer().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@given(st.sampled_from(_GRAMMARS), _texts)
def test_the_same_texts_are_taken(grammar: str, text: str) -> None:
    # The rewritten grammar finds an end that a terminal of the original runs over.
    assert takes(escaped_lark(grammar), spelled(text)) or not takes(grammar, text)


@given(st.sampled_from([one for one in _GRAMMARS if one is not PATCH]), _texts)
def test_no_other_texts_are_taken(grammar: str, text: str) -> None:
    single = grammar.count("/") <= 2 and "\n" not in grammar
    assert not single or takes(grammar, text) or not takes(escaped_lark(grammar), spelled(text))


def test_a_patch() -> None:
    patch = '*** Begin Patch\n*** Add File: a "b"\\c.py\n+print("hi\t")\n+\n*** End Patch\n'
    assert takes(PATCH, patch)
    rewritten = escaped_lark(PATCH)
    assert takes(rewritten, spelled(patch))
    assert not takes(rewritten, patch)
    assert not takes(rewritten, spelled(patch.replace("*** End", "*** And")))


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('start: "a"\n%ignore " "', "%ignore"),
        (r"start: /a\b/", r"\\b in a pattern"),
        ("start: /a b/x", "the flag x"),
        ("start: /[a/", "without an end"),
        ("start: <[5]>", "<["),
        ('start: "\\q"', "the text"),
        ("start: A\n%import common.UNKNOWN", "%import common.UNKNOWN"),
    ],
)
def test_what_cannot_be_rewritten(grammar: str, told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        escaped_lark(grammar)
    assert told.replace("\\\\", "\\") in str(caught.value)
