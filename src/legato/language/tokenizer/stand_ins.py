"""Tokenizes texts in which stand-ins keep special strings from being read as tokens."""

import json
import secrets
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.models import Model

from legato.language.conversation.guard import StandIns

_PRIVATE = 0xE000
_CONTEXTS = ("{}", " {} ", "a{}a", "\n{}\n")


class StandInEncoder:
    """Encodes like its tokenizer, except that special strings with a stand-in are plain text.

    A tokenizer cuts special tokens out of a text, then normalizes and splits the text between them.
    Here the normalizer first restores the characters that stand-ins replace. The text around them
    is split and merged as it would be around any other string.

    Args:
        backend: the tokenizer; its model is shared.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()

    def encode(self, text: str, stand_ins: StandIns) -> list[int]:
        """Return the token ids of `text` with its stand-ins restored."""
        return self._encode(self._model, text, stand_ins)

    def offsets(self, text: str, stand_ins: StandIns) -> list[tuple[int, int]]:
        """Return where each token begins and ends in the text: a stand-in is one character, too."""
        tokenizer = self._tokenizer(self._model, stand_ins)
        [encoding] = tokenizer.encode_batch([text], add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        return offsets

    def _encode(self, model: Model, text: str, stand_ins: StandIns) -> list[int]:
        tokenizer = self._tokenizer(model, stand_ins)
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        moved = self._moved(tokenizer)
        return [moved.get(token_id, token_id) for token_id in ids] if moved else ids

    def _tokenizer(self, model: Model, stand_ins: StandIns) -> Tokenizer:
        # A new tokenizer for each call, in a tenth of a millisecond: threads may share this object.
        tokenizer = Tokenizer(model)
        steps = [normalizers.Replace(stand_in, char) for stand_in, char in stand_ins.items()]
        own = [] if self._backend.normalizer is None else [self._backend.normalizer]
        tokenizer.normalizer = normalizers.Sequence([*steps, *own])
        tokenizer.pre_tokenizer = self._backend.pre_tokenizer
        tokenizer.add_tokens([_before_normalizing(self._added[i]) for i in sorted(self._added)])
        return tokenizer

    def _moved(self, tokenizer: Tokenizer) -> dict[int, int]:
        """Map ids of `tokenizer` to ids of the backend; only added tokens that differ."""
        ids = ((tokenizer.token_to_id(token.content), i) for i, token in self._added.items())
        return {theirs: ours for theirs, ours in ids if theirs is not None and theirs != ours}

    def warm_up(self) -> None:
        """Find the model to encode with, so that the first request does not wait for it."""
        self._model  # noqa: B018

    @cached_property
    def _model(self) -> Model:
        """The backend's model, without its special tokens if it would produce them from plain text.

        Word-level models do that, and Unigram, which finds a piece of its vocabulary in any text.
        """
        model: Model = self._backend.model
        special = {i: token.content for i, token in self._added.items() if token.special}
        firsts = sorted({text[0] for text in special.values()})
        stand_in_of = {first: chr(_PRIVATE + i) for i, first in enumerate(firsts)}
        texts = [stand_in_of[text[0]] + text[1:] for text in special.values()]
        stand_ins = {stand_in: first for first, stand_in in stand_in_of.items()}
        spelled = {
            token_id
            for context in _CONTEXTS
            for token_id in self._encode(model, "".join(map(context.format, texts)), stand_ins)
        }
        unknown = getattr(model, "unk_token", None)  # stands for any text
        if spelled.isdisjoint(token_id for token_id, text in special.items() if text != unknown):
            return model
        return _without(self._backend, frozenset(special.values()))


def _before_normalizing(token: AddedToken) -> AddedToken:
    """Make a special token match before normalization, which would restore the stand-ins."""
    if not (token.special and token.normalized):
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _without(backend: Tokenizer, texts: frozenset[str]) -> Model:
    """Return the model with some tokens renamed to secret texts; their ids stay taken."""
    secret = secrets.token_hex(16)

    def renamed(text: str) -> str:
        return f"{secret}{text}" if text in texts else text

    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {renamed(text): token_id for text, token_id in vocab.items()}
    else:
        model["vocab"] = [[renamed(text), score] for text, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed(model["unk_token"])
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if texts.isdisjoint((*pair, "".join(pair)))]
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    whole = dict.fromkeys(parts) | {"version": "1.0", "added_tokens": [], "model": model}
    made: Model = Tokenizer.from_str(json.dumps(whole)).model
    return made
