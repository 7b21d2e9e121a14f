"""SentencePiece's tokenizer.model and Mistral's tekken.json give their own libraries' tokens."""

import base64
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.checkpoint.source import ModelSource
from legato.core.errors import UnsupportedModelError
from legato.language.output_text import Detokenizer
from legato.language.tokenizer import converted
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    *(
        "",
        " ",
        " leading",
        "two  spaces",
        "   three, and trailing  ",
        "\n\nnew\n lines\t and a tab",
    ),
    *("▁under ▁▁ bars", "e\u0301 and é", "ﬁ ① ２ 1234567890", "a\u00a0b\u2003c", "\u0001\ufeff"),
    *(
        "👩‍👩‍👧 family 🇩🇪",
        "日本語のテキスト",
        "def f(x):\n    return  x",
        "aaaa aa",
        "<0x0A",
        "<start_of_turn>x",
    ),
    *("</ s>", "don't ' S"),
]
_ALPHABET = "ab cdeé\n\t  ▁日🙂12<>/ABthe in"
TEXTS += ["".join(random.Random(seed).choices(_ALPHABET, k=1 + seed % 37)) for seed in range(200)]
LINES = ["The model reads the text, and the text is read in tokens.", "日本語のテキスト"] * 20
LINES += [
    f"{first} {second} in the {third}"
    for first in "ab cde"
    for second in TEXTS[:20]
    for third in ("thing", "end")
    if "<" not in second
]
_PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
_LLAMA = _PLAIN | {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
_GEMMA = _LLAMA | {
    "add_dummy_prefix": False,
    "user_defined_symbols": ["\n\n", "▁▁", "<start_of_turn>", "aa"],
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "as Llama": _LLAMA,
    "as Gemma": _GEMMA,
    "normalized": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram of bytes": _PLAIN | {"model_type": "unigram", "byte_fallback": True},
}


def sentencepiece_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """Write the model of a kind, trained on `LINES`."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    options = {"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, **options | KINDS[kind] | changes
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return folder


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.vocabulary, skip_special_tokens=True)
    return "".join(map(detokenizer.push, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_sentencepiece(tmp_path: Path, kind: str) -> None:
    """Tokens, text and streamed text are SentencePiece's, after a beginning of sequence."""
    folder = sentencepiece_folder(tmp_path, kind)
    reference = sys.modules["sentencepiece"].SentencePieceProcessor(
        model_file=str(folder / "tokenizer.model")
    )
    tokenizer = load_tokenizer(ModelSource(folder))
    before = reference.encode("the")
    start = len(reference.decode(before))
    for text in TEXTS:
        expected = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [reference.bos_id(), *expected]
        if reference.unk_id() not in expected:  # which SentencePiece writes as ⁇
            assert tokenizer.decode(expected) == reference.decode(expected)
            assert streamed(tokenizer, expected) == reference.decode(before + expected)[start:]
    assert tokenizer.eos_token_id == reference.eos_id()
    special = {reference.bos_id(), reference.eos_id(), reference.unk_id(), reference.pad_id()}
    assert tokenizer.special_token_ids == special - {-1}


def test_special_pieces_in_a_text(tmp_path: Path) -> None:
    """They are tokens in a rendered conversation, and tokenizer_config.json decides about BOS."""
    folder = sentencepiece_folder(tmp_path, "as Llama", control_symbols=["[INST]"])
    config = {"add_bos_token": False, "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ModelSource(folder))
    ids = tokenizer.encode("<s>[INST]the</s>")
    assert [tokenizer.backend.id_to_token(i) for i in ids][:2] == ["<s>", "[INST]"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal says what to do."""
    source, path = ModelSource(tmp_path), tmp_path / "tokenizer.model"
    folder = sentencepiece_folder(tmp_path, "as Llama", model_type="char")
    with pytest.raises(
        UnsupportedModelError, match="model_type is 4; Legato reads Unigram and BPE"
    ):
        load_tokenizer(source)
    path.write_bytes(base64.b64encode(b"the") + b" 0\n")
    with pytest.raises(UnsupportedModelError, match=r"tiktoken's format .* save_pretrained"):
        load_tokenizer(source)
    sentencepiece_folder(folder, "as Llama", user_defined_symbols=["a" * 1100])
    with pytest.raises(UnsupportedModelError, match="a token of over 1024 characters"):
        load_tokenizer(source)
    monkeypatch.setattr(converted.transformers, "__version__", "5.23.0")
    with pytest.raises(UnsupportedModelError, match=r"needs transformers 5\.24"):
        load_tokenizer(source)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'legato-llm\[sentencepiece\]'"):
        load_tokenizer(source)


_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
_NUM_SPECIAL = 8


def tekken_folder(folder: Path, num_special: int = _NUM_SPECIAL, **changes: Any) -> Path:
    educational = pytest.importorskip("tiktoken._educational")
    trained = educational.bpe_train("\n".join(LINES), 400, _PATTERN, None)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in sorted(trained.items(), key=lambda item: item[1])
    ]
    contents = {
        "config": {
            "pattern": _PATTERN,
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": 390 + num_special,
            "default_num_special_tokens": num_special,
            "version": "v7",
        },
        "vocab": vocab,
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(_SPECIAL)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(contents | changes))
    return folder


def test_tekken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and streamed text are tiktoken's, of as many as the file says, after special ones."""
    folder = tekken_folder(tmp_path)
    monkeypatch.setattr(converted, "has_mistral_common", lambda: False)
    contents = json.loads((folder / "tekken.json").read_text())
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in contents["vocab"]}
    ranks = {token: rank for token, rank in ranks.items() if rank < 390}
    reference = sys.modules["tiktoken"].Encoding(
        "tekken", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    tokenizer = load_tokenizer(ModelSource(folder))
    assert tokenizer.vocab_size == 390 + _NUM_SPECIAL
    for text in TEXTS:
        expected = [_NUM_SPECIAL + token for token in reference.encode(text)]
        assert tokenizer.encode(text) == [1, *expected], text
        assert streamed(tokenizer, expected) == text
    assert tokenizer.encode("[INST]a[/INST]", add_special_tokens=False)[::2] == [3, 4]
    assert (tokenizer.eos_token_id, tokenizer.backend.id_to_token(7)) == (2, "<SPECIAL_7>")
    assert tokenizer.template_problem is not None
    tekken_folder(folder, special_tokens=None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'legato-llm\[mistral\]'"):
        load_tokenizer(ModelSource(folder))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab": [{"rank": 0}]}, "no list of tokens with token_bytes"),
        ({"vocab": []}, "first 256 tokens are not the bytes"),
        ({"config": {"default_num_special_tokens": 10**9}}, "of 1,048,576 at most"),
        ({"config": {"default_vocab_size": "8"}}, "of 1,048,576 at most"),
        ({"special_tokens": [{"rank": 5, "token_str": "a"}]}, "must be contiguous"),
        ({"special_tokens": [1]}, "cannot read"),
    ],
)
def test_damaged_tekken_files(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint):
        load_tokenizer(ModelSource(tekken_folder(tmp_path, **changes)))


def test_the_template_of_a_tekken_file(tmp_path: Path) -> None:
    """mistral-common makes it, and knows the special tokens of files without them."""
    pytest.importorskip("mistral_common")
    folder = tekken_folder(tmp_path, num_special=40, special_tokens=None)
    tokenizer = load_tokenizer(ModelSource(folder))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<s>[INST]hi[/INST]"
    written = load_tokenizer(ModelSource(tmp_path), "{{ messages[0].content }}")
    assert written.render_chat([{"role": "user", "content": "hi"}]) == "hi"
