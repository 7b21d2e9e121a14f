"""Builds a tokenizer from a GGUF file's metadata, as llama.cpp reads them. Torch-free.

transformers has such a builder too, but it imports torch, and splits the numbers of "smollm" files
unlike their tokenizer.json.
"""

import logging
import reprlib
from collections.abc import Iterable
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_SIZE
from legato.language.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

logger = logging.getLogger(__name__)

_Metadata = dict[str, Any]

_BPE_MODELS = {"gpt2": None, "gemma4": "gemma4"}
"""Key `tokenizer.ggml.model`, value the pre-tokenizer that it implies."""
MAX_TOKEN_CHARS = 1024
"""The time to build a tokenizer grows with the square of this."""


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
    if model in _BPE_MODELS:
        kind = _pre_tokenizer(_BPE_MODELS[model] or metadata.get("tokenizer.ggml.pre"))
        make = _byte_level_tokenizer if kind.is_byte_level else _character_tokenizer
        tokenizer, add_bos = make(metadata, kind), kind.add_bos
        if kind.needs_bos:
            metadata = {**metadata, "tokenizer.ggml.add_bos_token": True}
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece_tokenizer(metadata), True
    else:
        raise UnsupportedModelError(
            f"unsupported GGUF tokenizer {model!r}; Legato knows "
            f"{', '.join(map(repr, _BPE_MODELS))} and 'llama'"
        )
    for token_type, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token in _tokens_of_type(metadata, token_type)
            ]
        )
    return tokenizer, _wrapper_options(metadata, add_bos)


def _pre_tokenizer(name: object) -> PreTokenizer:
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"unsupported GGUF pre-tokenizer {name!r}; Legato knows {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level_tokenizer(metadata: _Metadata, kind: PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab(metadata), merges=_merges(metadata), ignore_merges=kind.ignore_merges
        )
    )
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.ends_as_gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _character_tokenizer(metadata: _Metadata, _: PreTokenizer) -> Tokenizer:
    return _spaced_tokenizer(metadata, _merges(metadata), add_prefix=False)


def _sentencepiece_tokenizer(metadata: _Metadata) -> Tokenizer:
    return _spaced_tokenizer(metadata, _merges_from_scores(metadata), add_prefix=True)


def _spaced_tokenizer(
    metadata: _Metadata, merges: list[tuple[str, str]], *, add_prefix: bool
) -> Tokenizer:
    """Build a tokenizer of characters, with U+2581 for a space.

    Args:
        add_prefix: whether a text begins with a space, in files that do not say.
    """
    unknown = _special_token(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab(metadata),
            merges=merges,
            unk_token=metadata["tokenizer.ggml.tokens"][0] if unknown is None else unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", add_prefix)
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


def _merges(metadata: _Metadata) -> list[tuple[str, str]]:
    halves = (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    return [(first, second) for first, _, second in halves]


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
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UnsupportedModelError(f"the GGUF file's chat template is {reprlib.repr(template)}")
    options: dict[str, Any] = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "chat_template": template,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _special_token(metadata, key)
        if token is not None:
            options[f"{name}_token"] = token
    return options


def _special_token(metadata: _Metadata, name: str) -> str | None:
    """Return a special token; None if the file has none, or an id that is of no token."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if type(token_id) is int and 0 <= token_id < len(tokens):
        return tokens[token_id]
    if token_id is not None:
        logger.warning(
            "the GGUF file has no %s token: %s is none of its %d tokens",
            name,
            reprlib.repr(token_id),
            len(tokens),
        )
    return None


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
