"""Builds a tokenizer from a GGUF file's metadata, as llama.cpp reads them. Torch-free.

transformers has such a builder too, but it imports torch, and splits the numbers of "smollm" files
unlike their tokenizer.json.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_SIZE

_Metadata = dict[str, Any]

_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


MAX_TOKEN_CHARS = 1024
"""The time to build a tokenizer grows with the square of this."""


class _ByteLevelKind(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one value of `tokenizer.ggml.pre`.

    Attributes:
        split: pattern of the pieces within which merges stay; None for GPT-2's own.
        individual_digits: split numbers into digits first.
        ignore_merges: take a piece that is a token whole, even if the merges would not.
        nfc: normalize the text to NFC.
        add_bos: default for files without this setting.
    """

    split: str | None = None
    individual_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_LLAMA3 = _ByteLevelKind(split=_WORD_SPLIT % 3, ignore_merges=True, add_bos=True)
_QWEN2 = _ByteLevelKind(split=_WORD_SPLIT % 1, nfc=True)
_BYTE_LEVEL_KINDS = {
    "gpt-2": _ByteLevelKind(),
    "smollm": _ByteLevelKind(individual_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _ByteLevelKind(split=_WORD_SPLIT % 3),
    "qwen2": _QWEN2,
    "qwen35": _ByteLevelKind(split=_MARKED_WORD_SPLIT, nfc=True),
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _ByteLevelKind(split=_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}


def build_gguf_tokenizer(metadata: _Metadata) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer that a GGUF file's metadata describe.

    Returns:
        The tokenizer, and options for transformers' wrapper: special tokens, whether to add them,
        and the chat template.

    Raises:
        UnsupportedModelError: an unsupported kind of tokenizer, or a malformed token.
        KeyError: the metadata lack a part of it.
    """
    _check_tokens(metadata.get("tokenizer.ggml.tokens", []))
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        kind = _byte_level_kind(metadata)
        tokenizer, add_bos = _byte_level_tokenizer(metadata, kind), kind.add_bos
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece_tokenizer(metadata), True
    else:
        raise UnsupportedModelError(
            f"unsupported GGUF tokenizer {model!r}; Legato knows 'gpt2' and 'llama'"
        )
    for token_type, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token in _tokens_of_type(metadata, token_type)
            ]
        )
    return tokenizer, _wrapper_options(metadata, add_bos)


def _byte_level_kind(metadata: _Metadata) -> _ByteLevelKind:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _BYTE_LEVEL_KINDS:
        raise UnsupportedModelError(
            f"unsupported GGUF pre-tokenizer {name!r}; Legato knows {', '.join(_BYTE_LEVEL_KINDS)}"
        )
    return _BYTE_LEVEL_KINDS[name]


def _byte_level_tokenizer(metadata: _Metadata, kind: _ByteLevelKind) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocab(metadata), merges=merges, ignore_merges=kind.ignore_merges)
    )
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(metadata: _Metadata) -> Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab(metadata),
            merges=_merges_from_scores(metadata),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    decode_steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if add_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decode_steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decode_steps)
    return tokenizer


def _merges_from_scores(metadata: _Metadata) -> list[tuple[str, str]]:
    """Turn SentencePiece scores into merges: neighbours with the best-scored union join first.

    Kudo and Richardson, 2018, arXiv:1808.06226.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    pieces = set(_tokens_of_type(metadata, TokenType.NORMAL))
    ranked = sorted(pieces, key=lambda piece: -scores[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _wrapper_options(metadata: _Metadata, add_bos: bool) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    options: dict[str, Any] = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            options[f"{name}_token"] = tokens[token_id]
    return options


def _check_tokens(tokens: Any) -> None:
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UnsupportedModelError("the GGUF tokenizer's tokens are not strings")
    if len(tokens) > MAX_SIZE:
        raise UnsupportedModelError(f"the GGUF tokenizer has {len(tokens)} tokens, over {MAX_SIZE}")
    if max(map(len, tokens), default=0) > MAX_TOKEN_CHARS:
        raise UnsupportedModelError(
            f"the GGUF tokenizer has a token of over {MAX_TOKEN_CHARS} characters"
        )


def _vocab(metadata: _Metadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _tokens_of_type(metadata: _Metadata, token_type: TokenType) -> Iterable[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    return (token for token, kind in zip(tokens, types, strict=True) if kind == token_type)
