"""Tokens decoded one by one are the text that transformers decodes, added tokens included."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from legato.core.structured_outputs import StructuredOutputs
from legato.grammar.matcher import compile_grammar
from legato.grammar.tokens import grammar_tokenizer
from legato.language.forms.check import GrammarChecker
from legato.language.output_text import Detokenizer, StopStrings
from legato.language.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from legato.language.tokenizer.tokenizer import Tokenizer, _Pretrained
from tests.language.test_tokenizer import byte_level_metadata, sentencepiece_metadata
from tests.language.tokenizer_families import FAMILIES, family
from tests.profiles import examples

_ADDED = ["▁▁", "▁▁▁", "  ", "\n\n", "<table>", "Ġx", "▁x", "日本", "##y", "x</w>", "<0x41>", "a b"]
_WORDS = ["[UNK]", "a", "b", "##b", "##y", "b</w>", "a</w>", ".", "▁a", "▁b", "▁", "n't", "<0x42>"]


def _added(backend: Backend) -> Backend:
    tokens = [AddedToken(text, special=False, normalized=False) for text in _ADDED]
    backend.add_tokens([AddedToken("<end>", special=True, normalized=False), *tokens])
    return backend


def _worded(decoder: Any) -> Callable[[], Backend]:
    def make() -> Backend:
        vocab = {word: i for i, word in enumerate(_WORDS)}
        backend = Backend(models.WordLevel(vocab, "[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if decoder is not None:
            backend.decoder = decoder
        return backend

    return make


def _gguf(metadata: dict[str, Any], kind: int) -> Callable[[], Backend]:
    """With tokens that the file's maker defined."""

    def make() -> Backend:
        more = [text for text in _ADDED if text not in metadata["tokenizer.ggml.tokens"]]
        own = dict(metadata)
        own["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *more]
        own["tokenizer.ggml.token_type"] = [
            *metadata["tokenizer.ggml.token_type"], *[kind] * len(more),
        ]  # fmt: skip
        if "tokenizer.ggml.scores" in metadata:
            own["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], *[0.0] * len(more)]
        return build_gguf_tokenizer(own)[0]

    return make


def _copy(name: str) -> Callable[[], Backend]:
    return lambda: Backend.from_str(family(name).backend.to_str())


def _gemma_by_metaspace() -> Backend:
    backend = _copy("gemma")()
    backend.decoder = decoders.Sequence(
        [decoders.Metaspace("▁", prepend_scheme="never"), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _unigram() -> Backend:
    scores = [(word, -float(i)) for i, word in enumerate(_WORDS)]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.decoder = decoders.Metaspace()
    return backend


_LAYOUTS: dict[str, Callable[[], Backend]] = {
    **{name: _copy(name) for name in FAMILIES},
    "gemma by metaspace": _gemma_by_metaspace,
    "unigram with bytes": _unigram,
    "wordpiece": _worded(decoders.WordPiece("##", cleanup=False)),
    "wordpiece, cleaned": _worded(decoders.WordPiece("##", cleanup=True)),
    "bpe by suffix": _worded(decoders.BPEDecoder("</w>")),
    "several steps": _worded(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Replace("b", "c"), decoders.Strip("a", 0, 0)]
        )
    ),
    "no decoder": _worded(None),
    "sentencepiece in gguf": _gguf(sentencepiece_metadata(), kind=4),
    "byte level in gguf": _gguf(byte_level_metadata("qwen2"), kind=4),
}


@cache
def _tokenizer(layout: str) -> Tokenizer:
    return Tokenizer(_Pretrained(_added(_LAYOUTS[layout]())))


@cache
def _ids(layout: str) -> tuple[list[int], list[int]]:
    """All ids but those of special tokens and of single bytes, and the added ones among them."""
    tokenizer = _tokenizer(layout)
    vocab = tokenizer.backend.get_vocab()
    free = [
        token_id
        for text, token_id in sorted(vocab.items(), key=lambda item: item[1])
        if token_id not in tokenizer.special_token_ids and not text.startswith("<0x")
    ]
    return free, [vocab[text] for text in _ADDED if not text.startswith("<0x")]


@pytest.mark.parametrize("layout", _LAYOUTS)
@examples(40)
@given(data=st.data())
def test_tokens_are_what_transformers_decodes(layout: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer(layout)
    free, added = _ids(layout)
    texts = st.text("ab ▁é日🎉\n<x", max_size=6).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    one = (st.sampled_from(added) | st.sampled_from(free)).map(lambda token_id: [token_id])
    drawn = data.draw(st.lists(one | texts, max_size=10))
    # Between two letters, as the ends of a text are treated in ways of their own.
    [letter] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    ids = [letter, *(token_id for several in drawn for token_id in several), letter]
    whole = tokenizer.pretrained.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    detokenizer = Detokenizer(tokenizer.vocabulary, skip_special_tokens=True)
    own = "".join(map(detokenizer.push, ids))
    assert own.lstrip(" ") == whole.lstrip(" ")


@pytest.mark.parametrize(
    "layout", ["gemma", "gemma by metaspace", "llama2", "unigram", "sentencepiece in gguf"]
)
def test_stops_and_grammars_see_the_spaces_of_code(layout: str) -> None:
    tokenizer = _tokenizer(layout)
    vocab = tokenizer.backend.get_vocab()
    ids = [vocab[text] for text in ("▁▁", "▁x")]
    vocabulary = tokenizer.vocabulary
    assert b"".join(map(vocabulary.token_bytes, ids)) == b"   x"
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=True)
    stops = StopStrings(["   x"], include_in_output=False)
    assert "".join(stops.push(detokenizer.push(token_id)) for token_id in ids) == ""
    assert stops.matched == "   x"
    source: Any = GrammarChecker(lambda: vocabulary).resolve(StructuredOutputs(regex=" {3}x"))
    matcher = compile_grammar(grammar_tokenizer(vocabulary), source.grammar).matcher
    assert matcher.try_consume_tokens(ids) == 2
    assert matcher.is_accepting()


@pytest.mark.parametrize("layout", [name for name in FAMILIES if name not in ("unigram", "words")])
@given(text=st.text("ab é日🎉\n<ﬁx", max_size=12))
@examples(40)
def test_tokens_begin_where_their_text_does(layout: str, text: str) -> None:
    tokenizer = family(layout)
    ids, starts = tokenizer.encode(text), tokenizer.starts(text)
    for token_id, (start, end) in zip(ids, pairwise([*starts, len(text)]), strict=True):
        own = tokenizer.token_bytes(token_id).decode(errors="replace")
        if "\ufffd" not in own and token_id not in tokenizer.special_token_ids:
            assert text[start:end].strip() == own.strip()
