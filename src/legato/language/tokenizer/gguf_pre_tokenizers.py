"""The values of `tokenizer.ggml.pre` in GGUF files: how a text is split before its tokens merge.

The names are llama.cpp's. Where it had to rewrite a pattern of the published tokenizer.json for its
own engine, the pattern here is the published one. Torch-free.
"""

from collections.abc import Mapping

import msgspec

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_MARKED_WORDS = (
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_words(end: str, digits: str, marks: str = r"[\r\n/]*", letters: str = "") -> str:
    """Return the pattern of words that begin in upper case or go on in lower case.

    Args:
        end: pattern of a word's end, such as a contraction.
        digits: pattern of a piece of a number.
        marks: pattern of the line ends after punctuation.
        letters: limits both classes of letters.
    """
    upper, lower = f"[{_UPPER}{letters}]", f"[{_LOWER}{letters}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{end}|{before}{upper}+{lower}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{marks}|" + _SPACES


_UP_TO_THREE = r"\p{N}{1,3}"
_GPT4O = _cased_words(_ENGLISH + "?", _UP_TO_THREE)
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = (_UP_TO_THREE, _HAN, _PUNCTUATED + r"[\r\n]*|" + _SPACES)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{1FBE}"
    r"\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}"
    r"\x{16E40}-\x{1DF2A}]]+"
)
"""Letters with two cases, as far as Unicode had them when DeepSeek LLM's list was made."""
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|\n+"


class PreTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one value of `tokenizer.ggml.pre`.

    Attributes:
        splits: patterns that split in turn, each the pieces of the one before.
        ends_as_gpt2: split by GPT-2's own pattern in the end.
        is_byte_level: bytes merge, written as GPT-2 does; otherwise characters, with U+2581 for a
            space, and a byte token for each byte of a character that has no token.
        ignore_merges: take a piece that is a token whole, even if the merges would not.
        nfc: normalize the text to NFC.
        add_bos: default for files without this setting.
        needs_bos: add it even if the file says otherwise, as files that were made too early do.
    """

    splits: tuple[str, ...] = ()
    ends_as_gpt2: bool = False
    is_byte_level: bool = True
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False
    needs_bos: bool = False


_GPT2 = PreTokenizer(ends_as_gpt2=True)
_GPT2_NFC = PreTokenizer(ends_as_gpt2=True, nfc=True)
_DIGITS = PreTokenizer(splits=(r"\p{N}",), ends_as_gpt2=True)
_LLAMA3 = PreTokenizer(splits=(_WORDS % "{1,3}",), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer(splits=(_WORDS % "{1,3}",))
_SINGLE_DIGITS = PreTokenizer(splits=(_WORDS % "",))
_QWEN2 = PreTokenizer(splits=(_WORDS % "",), nfc=True)
_O200K = PreTokenizer(splits=(_GPT4O,))
_DEEPSEEK = PreTokenizer(splits=_DEEPSEEK3)
_BAILING = PreTokenizer(
    splits=(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_CHARACTERS = PreTokenizer(is_byte_level=False)
_BLOOM = PreTokenizer(splits=(_SENTENCES,))
_AYA = PreTokenizer(splits=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

_NAMES: Mapping[str, PreTokenizer] = {
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum exaone4 jais "
    "trillion granite-docling jina-v1-en jina-v2-code roberta-bpe": _GPT2,
    "olmo mpt modern-bert": _GPT2_NFC,
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": _DIGITS,
    "command-r": PreTokenizer(splits=(r"\p{N}",), ends_as_gpt2=True, nfc=True),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3,
    "dbrx smaug-bpe glm4 chatglm-bpe": _CL100K,
    "stablelm2 solar-open grok-2": _SINGLE_DIGITS,
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan": _QWEN2,
    "qwen35": PreTokenizer(splits=(_MARKED_WORDS,), nfc=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _O200K,
    "granite-embed-multi-97m": PreTokenizer(splits=(_GPT4O,), ignore_merges=True),
    "tiny_aya cohere2moe": _AYA,
    "tekken": PreTokenizer(
        splits=(_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True
    ),
    "kimi-k2": PreTokenizer(
        splits=(
            r"\p{Han}+|"
            + _cased_words(_ENGLISH + "?", _UP_TO_THREE, r"[\r\n]*", r"&&[^\p{Han}]"),
        )
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK,
    "spark2_5": PreTokenizer(
        splits=(*_DEEPSEEK3[:2], _PUNCTUATED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "deepseek-llm": PreTokenizer(
        splits=(
            r"[\r\n]",
            _DEEPSEEK_LETTERS,
            _DEEPSEEK_PUNCTUATION,
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
    ),
    "youtu": PreTokenizer(
        splits=(
            "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，、\u3000-\u303f\ufe30-\ufe4f]+"
            f"|[\u3105-\u312f]+|{_HAN}",
            _cased_words(_ENGLISH + "?", r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer(
        splits=(r"[\p{P}\$\+<=>\^~\|`]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+"
                r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "[0-9][0-9][0-9]")
    ),
    "jais-2": PreTokenizer(
        splits=(
            _WORDS.removesuffix(r"|\s+(?!\S)|\s+") % "{1,3}"
            + "".join(rf"|\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ),
    "poro-chat bloom gpt3-finnish": _BLOOM,
    "viking": PreTokenizer(splits=(_SENTENCES, r"\p{N}")),
    "chameleon": PreTokenizer(
        splits=(
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
        ),
        ends_as_gpt2=True,
        add_bos=True,
    ),
    "superbpe": PreTokenizer(splits=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "seed-coder": PreTokenizer(
        splits=(
            _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,
        )
    ),
    "ufakzeka": PreTokenizer(splits=((_WORDS % "").removeprefix(_ENGLISH + "|"),)),
    "afmoe": PreTokenizer(
        splits=(
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
            "\u2f00-\u2fdf\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
            "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            _DEEPSEEK3[2],
        )
    ),
    "laguna": PreTokenizer(splits=(_LINES, _WORDS % "")),
    "exaone-moe": PreTokenizer(
        splits=(
            _ENGLISH + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": PreTokenizer(splits=(_UP_TO_THREE, _WORDS % "+"), ignore_merges=True),
    "gemma4 granite-embed-multi-311m": PreTokenizer(is_byte_level=False, needs_bos=True),
    "sarvam-moe": _CHARACTERS,
    "default": PreTokenizer(
        splits=(r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+"
                r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", r"\p{N}+", "[0-9][0-9][0-9]")
    ),
}  # fmt: skip
PRE_TOKENIZERS = {name: kind for names, kind in _NAMES.items() for name in names.split()}
"""Key the value of `tokenizer.ggml.pre`. All of llama.cpp's but "whitespace", of an encoder."""
