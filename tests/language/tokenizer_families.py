"""Small tokenizers of well-known families, trained on a few lines, with such chat templates.

Each has special tokens that its template writes, and `UNWRITTEN`, which none writes.
"""

import json
from collections.abc import Callable
from functools import lru_cache

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import Tokenizer as Backend

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.language.tokenizer.tokenizer import Tokenizer, _Pretrained, load_tokenizer

UNWRITTEN = ("<|reserved_0|>", "<|reserved_1|>")
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again: 0123456789.",
    "def main():\n    print('<a href=\"x\">[b]</a> | c')\n\n\n  two  spaces\tand a tab",
    "user system assistant end start turn im eot id header of INST reserved think tool call",
    "<|im_end|> <|im_start|> <s> </s> [INST] [/INST] <start_of_turn> <|eot_id|> <|reserved_0|>",
    "Grüße, 日本語, Ελληνικά, café ¤ ~ # $ % & ( ) * + - / ; = ? @ \\ ^ _ ` { } 🎉",
]
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA2 = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}
{%- else %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% endif %}{% endfor %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
QWEN = """{% for m in messages %}{% set content = m.content %}
{%- if m.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + content }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) }}
{{- '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}
{{- '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% if tools %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson(ensure_ascii=true)) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{{ '[TOOL_CALLS]' + (m.tool_calls | string) }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""
DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{{- ('<｜Assistant｜>' if m.role == 'assistant' else '<｜User｜>') + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
T5 = """{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"""


def _specials(*texts: str, special: bool = True) -> list[AddedToken]:
    return [AddedToken(text, special=special, normalized=False) for text in texts]


def _byte_level(split: str | None, *, nfc: bool = False, ignore_merges: bool = False) -> Backend:
    backend = Backend(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.model.ignore_merges = ignore_merges
    return backend


def _sentencepiece(first: str) -> Backend:
    """Args: first: where a space goes in front: to each part of a text, to the text, or nowhere."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=250, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {text: i for i, text in enumerate([*specials, *byte_tokens, *pieces])}
    merges = [tuple(pair) for pair in json.loads(trained.model.__getstate__())["merges"]]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
    ]  # fmt: skip
    if first == "each":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif first == "text":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(_specials(*specials))
    return backend


def _unigram(*, unwritten: bool) -> Backend:
    assert unwritten, "its vocabulary has them"
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>", *UNWRITTEN],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _words(*, unwritten: bool) -> Backend:
    """Words as a whole, the special ones among them."""
    assert unwritten, "its vocabulary has them"
    words = ["<unk>", "</s>", *UNWRITTEN, "user", "assistant", ":", "a", "b", "<", ">", "|"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens(_specials("<unk>", "</s>", *UNWRITTEN))
    return backend


def _llama3(*, unwritten: bool) -> Backend:
    backend = _byte_level(_LLAMA3_SPLIT, ignore_merges=True)
    names = ("begin_of_text", "start_header_id", "end_header_id", "eot_id")
    backend.add_tokens(_specials(*(f"<|{name}|>" for name in names)))
    return _finished(backend, unwritten=unwritten)


def _qwen(*, unwritten: bool) -> Backend:
    backend = _byte_level(_LLAMA3_SPLIT.replace("{1,3}", ""), nfc=True)
    backend.add_tokens(_specials("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    backend.add_tokens(
        _specials("<think>", "</think>", "<tool_call>", "</tool_call>", special=False)
    )
    return _finished(backend, unwritten=unwritten)


def _normalized(*, unwritten: bool) -> Backend:
    """Its special tokens are looked for once a text is normalized."""
    backend = _byte_level(None, nfc=True)
    names = ["<|im_start|>", "<|im_end|>", *(UNWRITTEN if unwritten else ())]
    backend.add_tokens([AddedToken(name, special=True, normalized=True) for name in names])
    return backend


def _gemma(*, unwritten: bool) -> Backend:
    backend = _sentencepiece("none")
    backend.add_tokens(_specials("<bos>", "<start_of_turn>", "<end_of_turn>"))
    backend.add_tokens(_specials("\n\n", "\n\n\n", "▁▁", "<table>", special=False))
    return _finished(backend, unwritten=unwritten)


def _mistral(*, unwritten: bool) -> Backend:
    backend = _byte_level(_LLAMA3_SPLIT, ignore_merges=True)
    names = ("INST", "/INST", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_CALLS")
    backend.add_tokens(_specials("<s>", "</s>", *(f"[{name}]" for name in names)))
    return _finished(backend, unwritten=unwritten)


def _deepseek(*, unwritten: bool) -> Backend:
    """Its roles are tokens that are not called special."""
    backend = _byte_level(_LLAMA3_SPLIT)
    backend.add_tokens(_specials("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"))
    backend.add_tokens(_specials("<｜User｜>", "<｜Assistant｜>", special=False))
    return _finished(backend, unwritten=unwritten)


def _llama2(first: str) -> Callable[..., Backend]:
    return lambda *, unwritten: _finished(_sentencepiece(first), unwritten=unwritten)


def _finished(backend: Backend, *, unwritten: bool) -> Backend:
    if unwritten:
        backend.add_tokens(_specials(*UNWRITTEN))
    return backend


_TEMPLATED: dict[str, tuple[Callable[..., Backend], str, tuple[str | None, str]]] = {
    "llama2 legacy": (_llama2("each"), LLAMA2, ("<s>", "</s>")),
    "llama2": (_llama2("text"), LLAMA2, ("<s>", "</s>")),
    "llama3": (_llama3, LLAMA3, ("<|begin_of_text|>", "<|eot_id|>")),
    "qwen": (_qwen, QWEN, (None, "<|im_end|>")),
    "normalized": (_normalized, QWEN, (None, "<|im_end|>")),
    "gemma": (_gemma, GEMMA, ("<bos>", "<end_of_turn>")),
    "mistral": (_mistral, MISTRAL, ("<s>", "</s>")),
    "deepseek": (_deepseek, DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")),
    "unigram": (_unigram, T5, (None, "</s>")),
    "words": (_words, T5, (None, "</s>")),
}
"""Key a family; value its tokenizer, its template, and tokens at the beginning and the end."""
FAMILIES = ("smollm2", *_TEMPLATED)
MERGING = tuple(name for name in _TEMPLATED if name not in ("unigram", "words"))
"""Those whose model does not know its special tokens."""


@lru_cache
def family(name: str, *, unwritten: bool = True) -> Tokenizer:
    """A tokenizer. Args: unwritten: whether `UNWRITTEN` are tokens, which changes no other id."""
    if name == "smollm2":
        return load_tokenizer(resolve_source(DEFAULT_MODEL))
    make, template, (bos, eos) = _TEMPLATED[name]
    options = {} if bos is None else {"bos_token": bos}
    pretrained = _Pretrained(
        make(unwritten=unwritten), chat_template=template, eos_token=eos, **options
    )
    return Tokenizer(pretrained)
