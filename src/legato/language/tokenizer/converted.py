"""Loads SentencePiece's `tokenizer.model` and Mistral's `tekken.json`. Torch-free.

transformers converts both. What it takes on trust is checked first, and refused with its remedy.
"""

import base64
import importlib.util
import logging
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

from legato.checkpoint.json_file import read_json
from legato.checkpoint.source import SENTENCEPIECE_FILE, TEKKEN_FILE
from legato.core.errors import UnsupportedModelError
from legato.core.validation import MAX_SIZE
from legato.language.tokenizer.gguf_tokenizer import MAX_TOKEN_CHARS

logger = logging.getLogger(__name__)

_LEAST_TRANSFORMERS = (5, 24)
"""Its earlier versions split SentencePiece's texts otherwise."""
_MODEL_TYPES = {1: "Unigram", 2: "BPE"}
_MAX_BYTES = 2**26
_SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
"""Mistral's, of all versions."""
_BYTES = [bytes([byte]) for byte in range(256)]
OTHERWISE = (
    "convert it with transformers' AutoTokenizer and save_pretrained, or name another's by "
    "--tokenizer"
)


def load_converted(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder without tokenizer.json.

    A prompt begins with the beginning of sequence, unless tokenizer_config.json says otherwise.

    Raises:
        UnsupportedModelError: the file cannot be used, or what reads it is not installed.
    """
    path = folder / TEKKEN_FILE
    if path.is_file():
        defaults = _tekken_defaults(path)
    else:
        path = folder / SENTENCEPIECE_FILE
        defaults = _sentencepiece_defaults(path)
    config = read_json(folder / "tokenizer_config.json")
    own = {name: value for name, value in defaults.items() if config.get(name) is None}
    return PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, vocab_file=str(path), **own
    )


def _sentencepiece_defaults(path: Path) -> dict[str, Any]:
    """Check a SentencePiece model; return options of its tokenizer."""
    if path.stat().st_size > _MAX_BYTES:
        raise UnsupportedModelError(f"{path} has more than {_MAX_BYTES:,} bytes")
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise UnsupportedModelError(
            f"{path} needs SentencePiece: pip install 'legato-llm[sentencepiece]'; or {OTHERWISE}"
        ) from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _LEAST_TRANSFORMERS:
        raise UnsupportedModelError(
            f"{path} needs transformers {'.'.join(map(str, _LEAST_TRANSFORMERS))}; or {OTHERWISE}"
        )
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        proto.Clear()
    if not proto.pieces:
        raise UnsupportedModelError(
            f"{path} is no SentencePiece model; a file in tiktoken's format does not say how to "
            f"split a text: {OTHERWISE}"
        )
    trained = proto.trainer_spec
    if trained.model_type not in _MODEL_TYPES:
        names = " and ".join(_MODEL_TYPES.values())
        raise UnsupportedModelError(
            f"{path}: model_type is {trained.model_type}; Legato reads {names}; or {OTHERWISE}"
        )
    _check_vocabulary(path, len(proto.pieces), max(len(piece.piece) for piece in proto.pieces))
    return {"add_bos_token": trained.bos_id >= 0}


def _tekken_defaults(path: Path) -> dict[str, Any]:
    """Check a tekken.json; return options of its tokenizer."""
    contents = read_json(path)
    vocab, special = contents.get("vocab"), contents.get("special_tokens")
    if not isinstance(vocab, list) or not all(
        isinstance(token, dict) and isinstance(token.get("token_bytes"), str) for token in vocab
    ):
        raise UnsupportedModelError(f"{path}: vocab is no list of tokens with token_bytes")
    longest = max((len(token["token_bytes"]) for token in vocab), default=0)
    sizes = contents.get("config") or {}
    counts = [sizes.get(f"default_{kind}") or 0 for kind in ("num_special_tokens", "vocab_size")]
    if not all(type(count) is int and 0 <= count <= MAX_SIZE for count in counts):
        raise UnsupportedModelError(
            f"{path}: default_num_special_tokens and default_vocab_size are {counts}, of "
            f"{MAX_SIZE:,} at most"
        )
    _check_vocabulary(path, len(vocab), longest)
    if [base64.b64decode(token["token_bytes"]) for token in vocab[:256]] != _BYTES:
        raise UnsupportedModelError(f"{path}: its first 256 tokens are not the bytes in order")
    if special is None and not has_mistral_common():
        raise UnsupportedModelError(
            f"{path} has no special_tokens; mistral-common knows those of its version: pip install "
            f"'legato-llm[mistral]'; or {OTHERWISE}"
        )
    if special is None:
        return {"add_bos_token": True, **_SPECIAL_TOKENS}
    texts = {token["token_str"] for token in special}
    own = {name: text for name, text in _SPECIAL_TOKENS.items() if text in texts}
    return {"add_bos_token": "bos_token" in own, **own}


def tekken_template(folder: Path) -> str | None:
    """Make the chat template of a tekken.json; None without mistral-common, or if it has none."""
    path = folder / TEKKEN_FILE
    if not (path.is_file() and has_mistral_common()):
        return None
    from mistral_common.integrations.chat_templates.chat_templates import (
        convert_tokenizer_to_chat_template,
    )

    try:
        template: str = convert_tokenizer_to_chat_template(path)
    except Exception as error:
        logger.warning("mistral-common makes no chat template of %s: %s", path, error)
        return None
    return template


def has_mistral_common() -> bool:
    """Whether the extra `mistral` is installed."""
    return importlib.util.find_spec("mistral_common") is not None


def _check_vocabulary(path: Path, num_tokens: int, longest: int) -> None:
    if num_tokens > MAX_SIZE:
        raise UnsupportedModelError(f"{path} has {num_tokens:,} tokens, over {MAX_SIZE:,}")
    if longest > MAX_TOKEN_CHARS:
        raise UnsupportedModelError(f"{path} has a token of over {MAX_TOKEN_CHARS} characters")
