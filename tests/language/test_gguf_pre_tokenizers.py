"""How texts are split before tokens merge, by the name in a GGUF file."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import regex
from gguf.constants import TokenType
from tokenizers import pre_tokenizers
from transformers import (
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from legato.language.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from legato.language.tokenizer.gguf_tokenizer import build_gguf_tokenizer

TEXT = "I'll DON'T  pay12345 a/b!!\n\n x漢字かなไทย é👍 1,5 \t\r\nend "
PIECES = (
    (
        "gpt-2 olmo exaone4",
        "I¦'ll¦ DON¦'¦T¦ ¦ pay¦12345¦ a¦/¦b¦!!¦↵↵¦ x漢字かなไทย¦ é¦👍¦ 1¦,¦5¦ →⏎¦↵¦end¦ ",
    ),
    (
        "refact smollm command-r mellum2",
        "I¦'ll¦ DON¦'¦T¦ ¦ pay¦1¦2¦3¦4¦5¦ a¦/¦b¦!!¦↵↵¦ x漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎¦↵¦end¦ ",
    ),
    (
        "llama-bpe dbrx glm4 chatglm-bpe minicpm5 lfm2 jais-2",
        "I¦'ll¦ DON¦'T¦ ¦ pay¦123¦45¦ a¦/b¦!!↵↵¦ x漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "qwen2 qwen35 hunyuan tekken bailingmoe grok-2 ufakzeka",
        "I¦'ll¦ DON¦'T¦ ¦ pay¦1¦2¦3¦4¦5¦ a¦/b¦!!↵↵¦ x漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "gpt-4o llama4 minimax-m2",
        "I'll¦ DON'T¦ ¦ pay¦123¦45¦ a¦/b¦!!↵↵¦ x漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "tiny_aya",
        "I'll¦ DON'T¦ ¦ pay¦12¦345¦ a¦/b¦!!↵↵¦ x漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "kimi-k2",
        "I'll¦ DON'T¦ ¦ pay¦123¦45¦ a¦/b¦!!↵↵¦ x¦漢字¦かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "deepseek-v3 hunyuan-dense",
        "I¦'ll¦ DON¦'T¦ ¦ pay¦123¦45¦ a¦/b¦!!↵↵¦ x¦漢字かな¦ไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "deepseek-llm",
        "I¦'¦ll¦ DON¦'¦T¦ ¦ pay¦12345¦ a¦/¦b¦!!¦↵¦↵¦ x¦漢字かなไทย¦ é¦👍 ¦1¦,¦5¦ →¦⏎¦↵¦end¦ ",
    ),
    (
        "youtu",
        "I'll¦ DON'T¦ ¦ pay¦1¦2¦3¦4¦5¦ a¦/b¦!!↵↵¦ x¦漢字かな¦ไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "falcon",
        "I¦'¦ll¦ DON¦'¦T¦ ¦ pay¦123¦45¦ a¦/¦b¦!!¦↵↵¦ x漢字かなไทย¦ é¦👍¦ 1¦,¦5¦ →⏎¦↵¦end¦ ",
    ),
    (
        "viking",
        "I'll¦ DON'T¦ ¦ pay¦1¦2¦3¦4¦5¦ a/b¦!!↵↵¦ x漢字かなไทย¦ é👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "afmoe",
        "I¦'ll¦ DON¦'T¦ ¦ pay¦12¦345¦ a¦/b¦!!↵↵¦ x¦漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
    (
        "laguna",
        "I¦'ll¦ DON¦'T¦ ¦ pay¦1¦2¦3¦4¦5¦ a¦/b¦!!¦↵↵¦ x漢字かなไทย¦ é¦👍¦ ¦1¦,¦5¦ →⏎¦↵¦end¦ ",
    ),
    (
        "exaone-moe",
        "I¦'ll¦ DON¦'T¦ ¦ pay¦1¦2¦3¦4¦5¦ a¦/b¦!!↵¦↵¦ x漢字かなไทย é¦👍¦ ¦1¦,¦5¦ →⏎↵¦end¦ ",
    ),
)
"""Names and pieces; ↵, ⏎ and → stand for the line ends and the tab."""
PUBLISHED = {
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "glm4": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (
        r"(?V1)[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
}
"""Patterns of published tokenizers, which another engine splits by here."""
PARTS = [
    "'",
    "ll",
    "RE",
    "Hello",
    "été",
    "e\u0301",
    "x",
    "Ab",
    "漢",
    "字",
    "かな",
    "ไทยำ",
    "한글",
    "Ж",
]
PARTS += ["٣", "12345", "7", "½", " ", "  ", "\t", "\n", "\r\n", "\u3000", "!", "…", "。", "/", "_"]
PARTS += ["👩‍👩‍👧", "🎉", "€", "\u200d", "$"]


def difficult_texts() -> Iterator[str]:
    source = random.Random(0)
    yield TEXT
    for _ in range(300):
        yield "".join(source.choice(PARTS) for _ in range(source.randrange(1, 16)))


def metadata(pre: str, **further: Any) -> dict[str, Any]:
    """Return metadata of a vocabulary of bytes and a few merges, some across kinds of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "3 4", "l l", "' ll", "Ġ x", "Ċ Ċ", "Ġ Ġ", "! !", "e l", "Ã ©"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        **further,
    }


def pieces(pre: str, text: str) -> list[str]:
    """Return the pieces of a text, which ByteLevel writes by bytes; each is decoded again."""
    backend, _ = build_gguf_tokenizer(metadata(pre))
    assert backend.pre_tokenizer is not None
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize(
    ("pre", "expected"), [(pre, own) for names, own in PIECES for pre in names.split()]
)
def test_pieces_of_a_difficult_text(pre: str, expected: str) -> None:
    shown = "¦".join(pieces(pre, TEXT))
    assert shown.translate(str.maketrans("\n\r\t", "↵⏎→")) == expected


@pytest.mark.parametrize("pre", PUBLISHED)
def test_published_patterns_split_alike_in_another_engine(pre: str) -> None:
    for text in difficult_texts():
        expected = [text]
        for pattern in PUBLISHED[pre]:
            expected = [part for piece in expected for part in isolated(pattern, piece)]
        assert pieces(pre, text) == expected, repr(text)


def isolated(pattern: str, text: str) -> Iterator[str]:
    """Yield the matches and what is between them."""
    end = 0
    for match in regex.finditer(pattern, text):
        if match.start() > end:
            yield text[end : match.start()]
        yield match[0]
        end = match.end()
    if end < len(text):
        yield text[end:]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_character_is_lost(pre: str) -> None:
    if not PRE_TOKENIZERS[pre].is_byte_level or PRE_TOKENIZERS[pre].nfc:
        return
    backend, _ = build_gguf_tokenizer(metadata(pre))
    for text in (TEXT, *list(difficult_texts())[:20]):
        assert backend.decode(backend.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "kind"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("mpt", GPTNeoXTokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_tokens_are_those_of_transformers(pre: str, kind: type[PreTrainedTokenizerFast]) -> None:
    fields = metadata(pre)
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    vocab = {token: index for index, token in enumerate(tokens)}
    theirs = kind(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    backend, _ = build_gguf_tokenizer(fields)
    for text in difficult_texts():
        assert backend.encode(text).ids == theirs.encode(text, add_special_tokens=False), repr(text)


def test_tokens_of_gemma4_are_those_of_transformers() -> None:
    """Characters merge across spaces and line ends, and others become bytes."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = [*"\n▁Helxpay'!/123", "\t"]
    merges = ["\n \n", "▁ ▁", "▁▁ ▁", "l l", "H e", "He ll", "▁ x", "1 2", "▁ He", "! !"]
    whole = [*dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *whole]
    kinds = [TokenType.CONTROL] * 5 + [TokenType.BYTE] * 256
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    fields = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    vocab = {token: index for index, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    backend, options = build_gguf_tokenizer(fields)
    for text in difficult_texts():
        ids = backend.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False), repr(text)
        assert backend.decode(ids) == text
    assert options["add_bos_token"], "older files say otherwise, and llama.cpp corrects them"
