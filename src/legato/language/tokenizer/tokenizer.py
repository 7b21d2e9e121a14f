"""Encodes text, decodes tokens and renders conversations. Torch-free, for the text processes."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend
from transformers import PreTrainedTokenizerFast

from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.json_file import read_json
from legato.checkpoint.source import ModelSource
from legato.core.errors import InvalidRequestError, UnsupportedModelError
from legato.core.validation import check_token_ids, refusing_what_fails
from legato.core.vocabulary import Vocabulary
from legato.language.conversation.guard import MessageGuard, SpecialStrings, StandIns
from legato.language.message.message_syntax import MessageSyntax
from legato.language.tokenizer.converted import OTHERWISE, load_converted, tekken_template
from legato.language.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from legato.language.tokenizer.stand_ins import StandInEncoder
from legato.language.tokenizer.token_bytes import TokenDecoder

_PRIVATE = ("name_or_path", "auto_map", "local_files_only", "backend")
"""Options of a tokenizer that concern this machine only."""
_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
"""Files that may have a chat template where those of the tokenizer have none."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        pretrained: transformers' tokenizer.
        backend: the `tokenizers.Tokenizer` underneath.
        vocab_size: number of tokens, added ones included; the model's own V may be larger.
        eos_token_id: the tokenizer's end-of-sequence token; None without one.
        special_token_ids: tokens that steer the model and are not part of the text.
        max_token_chars: characters of the longest token, so that a text of more than N times this
            has more than N tokens.
        response_template: the checkpoint's declaration of its messages, unchecked.
        template_problem: why the model's chat template is unusable; None if it is usable.
    """

    def __init__(self, pretrained: PreTrainedTokenizerFast) -> None:
        self.pretrained = pretrained
        self.backend: TokenizerBackend = pretrained.backend_tokenizer
        # A tokenizer.json may have been saved with these on, and would silently cut prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = pretrained.eos_token_id
        self._added = self.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, added in self._added.items() if added.special)
        self._decoder = TokenDecoder(self.backend)
        vocab = self.backend.get_vocab()
        self.max_token_chars = max(map(len, vocab), default=1)
        self._num_ids = 1 + max(vocab.values(), default=-1)
        self.response_template: object = getattr(pretrained, "response_template", None)
        self.template_problem: str | None = None
        if pretrained.chat_template is None:
            self.template_problem = (
                "this model has no chat template; use completions, or give a chat template"
            )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of all tokens, to decode tokens one by one."""
        return Vocabulary.of(map(self.token_bytes, range(self._num_ids)), self.special_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; `add_special_tokens` adds those around a prompt.

        Raises:
            InvalidRequestError: the text has a lone surrogate.
        """
        _check_characters(text, "a prompt")
        # Unlike `encode`, this computes no offsets, which would double the time.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def encode_pair(self, first: str, second: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of two texts, in the tokenizer's own form for pairs.

        Raises:
            InvalidRequestError: a text has a lone surrogate.
        """
        for text in (first, second):
            _check_characters(text, "a prompt")
        (encoding,) = self.backend.encode_batch_fast(
            [(first, second)], add_special_tokens=add_special_tokens
        )
        token_ids: list[int] = encoding.ids
        return token_ids

    def encode_rendered(self, text: str, stand_ins: StandIns) -> list[int]:
        """Return the token ids of a conversation that `render_chat` rendered.

        Args:
            stand_ins: the stand-ins that a `MessageGuard` put into it.
        """
        if not stand_ins:
            return self.encode(text, add_special_tokens=False)
        return self._stand_in_encoder.encode(text, stand_ins)

    def offsets(
        self, text: str, *, add_special_tokens: bool = True, stand_ins: StandIns | None = None
    ) -> list[tuple[int, int]]:
        """Return where each token of `encode` or `encode_rendered` begins and ends in the text.

        In characters; a special token that was added begins and ends at 0.
        """
        if stand_ins:
            return self._stand_in_encoder.offsets(text, stand_ins)
        [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        return offsets

    def starts(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return where each token of `encode` begins in the text, its own space included.

        In characters; special tokens that were added are at the text's ends.
        """
        [whole] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        num_before = next((i for i, added in enumerate(whole.special_tokens_mask) if not added), 0)
        # Without a post-processor, which may cut space off.
        starts = [start for start, _ in self._stand_in_encoder.offsets(text, {})]
        num_after = max(0, len(whole.ids) - num_before - len(starts))
        return [0] * num_before + starts + [len(text)] * num_after

    def message_guard(self, template: str, syntax: MessageSyntax) -> MessageGuard:
        """Return a guard against special tokens in conversations for this chat template.

        It guards the tokenizer's special tokens, and added tokens that the template writes, such as
        DeepSeek's `<｜User｜>`, which are not declared special. It lets pass marks of reasoning and
        tool calls that are not declared special.
        """
        marks = syntax.marks
        in_marks = {added.content for added in self._added.values() if _is_in(added, marks)}
        written = {
            added.content
            for added in self._added.values()
            if added.special or (added.content in template and added.content not in in_marks)
        }
        others = [added.content for added in self._added.values()]
        return MessageGuard(
            SpecialStrings(written, others),
            SpecialStrings(written.difference(in_marks), others),
            template,
        )

    @cached_property
    def _stand_in_encoder(self) -> StandInEncoder:
        return StandInEncoder(self.backend)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, as `Vocabulary.token_bytes` does."""
        added = self._added.get(token_id)
        if added is not None and added.special:
            content: str = added.content
            return content.encode()
        token: str | None = self.backend.id_to_token(token_id)
        return b"" if token is None else self._decoder.bytes_of(token)

    @property
    def info(self) -> dict[str, Any]:
        """Its configuration, as in tokenizer_config.json without paths of files; for JSON."""
        pretrained = self.pretrained
        told = {
            name: _plain(value)
            for name, value in pretrained.init_kwargs.items()
            if not name.endswith("_file") and name not in _PRIVATE
        }
        told.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if pretrained.chat_template is not None:
            told["chat_template"] = pretrained.chat_template
        return told

    def warm_up(self) -> None:
        """Prepare everything that the first conversation needs, except for the template."""
        self._stand_in_encoder.warm_up()

    def try_template(self) -> None:
        """Compile the template, and render a short message.

        A template that is no valid Jinja becomes the `template_problem`.

        Raises:
            MemoryError: it takes more memory than the process may.
        """
        try:
            self.render_chat([{"role": "user", "content": "Hello"}])
        except InvalidRequestError as error:
            # It may reject this conversation, but it has been compiled by then.
            if isinstance(error.__cause__, TemplateSyntaxError):
                wrong = error.__cause__
                self.template_problem = (
                    f"the chat template is not valid Jinja: line {wrong.lineno}: {wrong.message}"
                )

    def chat_template(self, given: str | None = None, *, has_tools: bool = False) -> str:
        """Return the template for a conversation; a checkpoint may have several.

        Args:
            given: replaces the model's own template.
            has_tools: whether tools go with the conversation.

        Raises:
            InvalidRequestError: the model has no template.
        """
        if given is None and self.template_problem is not None:
            raise InvalidRequestError(self.template_problem, param="messages")
        tools: list[dict[str, Any]] | None = [{}] if has_tools else None
        try:
            return str(self.pretrained.get_chat_template(given, tools))
        except ValueError as error:
            raise InvalidRequestError(str(error), param="messages") from error

    def is_token(self, text: str) -> bool:
        """Whether the vocabulary has a token of this text."""
        return self.backend.token_to_id(text) is not None

    def special_marks(self, syntax: MessageSyntax) -> dict[str, int]:
        """Return the special tokens in the marks of a syntax, which decoded text omits.

        A mark may be one token, as `</think>` is, or have one in it, as `<｜DSML｜invoke name="`.

        Returns:
            Key a token's text, value its id.
        """
        return {
            added.content: token_id
            for token_id, added in self._added.items()
            if added.special and _is_in(added, syntax.marks)
        }

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation with the model's template, in transformers' Jinja sandbox.

        A template may take any amount of time and memory: a server must limit both.

        Args:
            messages: each with keys "role" and "content", and others that the template reads.
            tools: functions that the model may call, in OpenAI's form.
            add_generation_prompt: end with the opening of an assistant's message.
            continue_final_message: leave the last message open for the model to continue.
            chat_template: replaces the model's own template.
            kwargs: further variables of the template.

        Raises:
            InvalidRequestError: there is no template, it refuses these messages, or it writes a
                lone surrogate.
            MemoryError: the template needs more memory than there is.
        """
        if chat_template is None and self.template_problem is not None:
            raise InvalidRequestError(self.template_problem, param="messages")
        try:
            text: str = self.pretrained.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **kwargs,
            )
        except MemoryError:
            raise
        # The model author's program, run on a client's data, may raise anything.
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {error}", param="messages"
            ) from error
        _check_characters(text, "the chat template's text", param="messages")
        return text


class _Pretrained(PreTrainedTokenizerFast):  # type: ignore[misc]
    """transformers' wrapper around a new backend; the base constructor would copy the backend."""

    def __init__(self, backend: TokenizerBackend, **options: Any) -> None:
        self._tokenizer = backend
        super().__init__(**options)


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> Tokenizer:
    """Load a checkpoint's tokenizer: its file, or the one a GGUF file describes.

    Args:
        chat_template: a template's text, in place of the tokenizer's own.

    Raises:
        UnsupportedModelError: there is no tokenizer, or its kind is not supported.
    """
    if source.is_gguf:
        metadata = GGUFFile(source.path).metadata
        with refusing_what_fails(source.path):
            backend, options = build_gguf_tokenizer(metadata)
            return _tokenizer(_Pretrained(backend, **options), chat_template)
    if not source.has_tokenizer:
        raise UnsupportedModelError(
            f"{source.path} has no tokenizer.json, tekken.json or tokenizer.model; {OTHERWISE}"
        )
    path = source.path / "tokenizer.json"
    with refusing_what_fails(source.path):
        if path.is_file():
            # The base class reads it directly; AutoTokenizer would import torch.
            pretrained = PreTrainedTokenizerFast.from_pretrained(source.path, local_files_only=True)
            check_token_ids(path, pretrained.get_vocab())
        else:
            pretrained = load_converted(source.path)
        if pretrained.chat_template is None:
            pretrained.chat_template = _processor_template(source.path)
        if pretrained.chat_template is None and chat_template is None and not path.is_file():
            pretrained.chat_template = tekken_template(source.path)
        _drop_added_eos(pretrained, read_json(source.path / "tokenizer_config.json"))
        return _tokenizer(pretrained, chat_template)


def _processor_template(folder: Path) -> str | dict[str, str] | None:
    """Return the chat template in the files of a processor of images; None without one."""
    for name in _PROCESSOR_FILES:
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, str | dict):
            return template
    return None


def _drop_added_eos(pretrained: PreTrainedTokenizerFast, config: dict[str, Any]) -> None:
    """Add no end of sequence after a prompt where the configuration says so.

    The post-processor in tokenizer.json may add one all the same, as in OLMo.
    """
    backend, eos = pretrained.backend_tokenizer, pretrained.eos_token
    if config.get("add_eos_token") is not False or eos is None:
        return
    whole = json.loads(backend.to_str()) if backend.encode("").tokens[-1:] == [eos] else {}
    processor = whole.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        for kind in ("single", "pair"):
            items = step.get(kind)
            if isinstance(items, list):
                step[kind] = [item for item in items if _special_id(item) != eos]
    if whole:
        backend.post_processor = TokenizerBackend.from_str(json.dumps(whole)).post_processor


def _special_id(item: dict[str, Any]) -> object:
    return item.get("SpecialToken", {}).get("id")


def _tokenizer(pretrained: PreTrainedTokenizerFast, chat_template: str | None) -> Tokenizer:
    if chat_template is not None:
        pretrained.chat_template = chat_template
    return Tokenizer(pretrained)


def _is_in(added: AddedToken, marks: tuple[str, ...]) -> bool:
    return any(added.content in mark for mark in marks)


def _check_characters(text: str, what: str, param: str | None = None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequestError(
            f"{what} has a lone surrogate, U+{code:04X}, which is no character", param=param
        ) from error


def _plain(value: Any) -> Any:
    """Replace added tokens by their text, at any depth."""
    if isinstance(value, AddedToken):
        return value.content
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
