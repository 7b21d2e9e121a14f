"""Text to token ids and back. Torch-free: the server process uses it."""

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as TokenizerBackend
from transformers import PreTrainedTokenizerFast

from legato.core.errors import InvalidRequestError, UnsupportedModelError
from legato.model.gguf_file import GGUFFile
from legato.model.gguf_tokenizer import build_gguf_tokenizer
from legato.model.source import ModelSource
from legato.model.validation import refusing_what_fails

_SPACE = "▁"


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        vocab_size: number of tokens, added ones included; the model's own V may be larger.
        largest_token_id: -1 where there are no tokens at all.
        eos_token_id: the tokenizer's end-of-sequence token, None where it has none.
        special_token_ids: tokens that steer the model and are no part of the text.
        max_token_chars: characters of the longest token, so that a text of more than this times N
            is more than N tokens.
    """

    def __init__(self, pretrained: PreTrainedTokenizerFast) -> None:
        self._pretrained = pretrained
        self.backend: TokenizerBackend = pretrained.backend_tokenizer
        # A tokenizer.json may have been saved with these on; they would cut prompts silently.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = pretrained.eos_token_id
        self._added = self.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, added in self._added.items() if added.special)
        self._is_byte_level = _is_byte_level(self.backend)
        vocabulary = self.backend.get_vocab()
        self.largest_token_id = max(vocabulary.values(), default=-1)
        self.max_token_chars = max(map(len, vocabulary), default=1)

    @property
    def has_chat_template(self) -> bool:
        return self._pretrained.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model puts around a prompt."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, empty for an id that is no token.

        A SentencePiece token keeps its leading space, which `decode` drops at the start of a text.
        """
        if token_id in self._added:
            content: str = self._added[token_id].content
            return content.encode()
        piece: str | None = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(map(_byte_of_letter().__getitem__, piece))
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_SPACE, " ").encode()

    def warm_up(self) -> None:
        """Compile the template, which the first conversation would otherwise wait for."""
        # A template may refuse what is no real conversation; it is compiled then, too.
        with suppress(InvalidRequestError):
            self.apply_chat_template([{"role": "user", "content": "Hello"}])

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Render a conversation with the model's template, in transformers' Jinja sandbox.

        Args:
            messages: each with keys "role" and "content", and what else the template reads.
            add_generation_prompt: end with the opening of an assistant's message.
            continue_final_message: leave the last message open, for the model to go on with.
            chat_template: a template in place of the model's own.
            kwargs: further variables of the template.

        Returns:
            The token ids; special tokens are those that the template writes, no others.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use completions, or give a chat template",
                param="messages",
            )
        try:
            text = self._pretrained.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **kwargs,
            )
        # A template is a program of the model's author, run on a client's data: it raises anything.
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {error}", param="messages"
            ) from error
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Load the tokenizer beside a checkpoint: its tokenizer.json, or what a GGUF file describes.

    Raises:
        UnsupportedModelError: there is none, or of a kind that Legato does not know.
    """
    if source.is_gguf:
        metadata = GGUFFile(source.path).metadata
        with refusing_what_fails(source.path):
            backend, options = build_gguf_tokenizer(metadata)
            return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **options))
    if not (source.path / "tokenizer.json").is_file():
        raise UnsupportedModelError(
            f"{source.path} has no tokenizer.json; convert its tokenizer with transformers' "
            "AutoTokenizer and save_pretrained"
        )
    # The base class takes tokenizer.json as it is; AutoTokenizer would import torch.
    with refusing_what_fails(source.path):
        pretrained = PreTrainedTokenizerFast.from_pretrained(source.path, local_files_only=True)
        return Tokenizer(pretrained)


def _is_byte_level(backend: TokenizerBackend) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    return any(step["type"] == "ByteLevel" for step in decoder.get("decoders", [decoder]))


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's spelling of bytes (Radford et al., 2019): key the letter, value the byte.

    Printable Latin-1 characters stand for themselves, the rest for the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
