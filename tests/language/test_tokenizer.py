"""Tokenizers: SmolLM2's, tokenizer.json folders, SentencePiece and byte-level GGUF metadata."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf.constants import TokenType
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from legato.checkpoint.defaults import ModelDefaults, load_defaults
from legato.checkpoint.gguf_file import GGUFFile
from legato.checkpoint.gguf_keys import key_use
from legato.checkpoint.source import (
    _HUB_IGNORED,
    _MODEL_PATTERNS,
    ModelSource,
    resolve_source,
)
from legato.core.config import DEFAULT_MODEL
from legato.core.errors import InvalidRequestError, UnsupportedModelError
from legato.language.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from legato.language.tokenizer.tokenizer import Tokenizer, _Pretrained, load_tokenizer

TEXTS = [
    "Hello, world!",
    "  two spaces, a tab\t and\n\nnew lines  ",
    "日本語と中文 and Ελληνικά",
    "👩‍👩‍👧 families and 🎉",
    "1234567890 in 2025",
    "don't <notspecial> café",
]


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(messages, **options), add_special_tokens=False)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_a_lone_surrogate_has_no_tokens(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D800"):
        smollm2.encode("a\ud800")
    with pytest.raises(InvalidRequestError, match=r"U\+DFFF") as info:
        smollm2.render_chat([{"role": "user"}], chat_template="{{ '%c' % 0xdfff }}")
    assert info.value.param == "messages"


def test_smollm2_splits(smollm2: Tokenizer) -> None:
    assert [smollm2.decode([i]) for i in smollm2.encode("12345")] == list("12345")
    assert smollm2.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert smollm2.decode([1, 4093, 2]) == "user"
    assert smollm2.decode([1, 4093, 2], skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    assert smollm2.token_bytes(1) == b"<|im_start|>"
    assert smollm2.token_bytes(10**6) == b""
    assert (smollm2.eos_token_id, smollm2.vocab_size) == (2, 49152)


def test_chat_template(smollm2: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert smollm2.template_problem is None
    assert smollm2.decode(chat_ids(smollm2, messages), False) == text
    messages.append({"role": "assistant", "content": "Hel"})
    ids = chat_ids(smollm2, messages, add_generation_prompt=False, continue_final_message=True)
    assert smollm2.decode(ids, False) == text + "Hel"
    template = "{{ greeting }} {{ messages[0]['content'] }}"
    ids = chat_ids(smollm2, messages, chat_template=template, greeting="Now")
    assert smollm2.decode(ids) == "Now Be brief."


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{% if %}", "{{ messages[9].x }}"]
)
def test_template_errors(smollm2: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template failed") as info:
        chat_ids(smollm2, [{"role": "user", "content": ""}], chat_template=template)
    assert info.value.param == "messages"


@pytest.fixture
def byte_folder(tmp_path: Path) -> Path:
    """A folder whose tokenizer has a token a byte, adds <bos>, and was saved with truncation on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 256)]
    )
    backend.enable_truncation(4)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(tmp_path)
    return tmp_path


def test_folder(byte_folder: Path) -> None:
    tokenizer = load_tokenizer(ModelSource(byte_folder))
    ids = tokenizer.encode("a longer text: 🎉")
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "a longer text: 🎉"
    assert tokenizer.encode("x", add_special_tokens=False) == ids[:0] + tokenizer.encode("x")[1:]
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([i]) for i in range(256)}
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    chat = chat_ids(tokenizer, [{"role": "user", "content": "x"}], chat_template=template)
    assert chat == tokenizer.encode("x")
    assert tokenizer.template_problem
    with pytest.raises(InvalidRequestError, match="no chat template"):
        chat_ids(tokenizer, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("in_sequence", [True, False])
def test_an_end_of_sequence_after_prompts(
    byte_folder: Path, says: bool | None, in_sequence: bool
) -> None:
    """OLMo's post-processor adds one, though its configuration denies that."""
    path, config = byte_folder / "tokenizer.json", byte_folder / "tokenizer_config.json"
    contents = json.loads(path.read_text())
    backend = Backend.from_str(json.dumps(contents))
    own = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 256), ("<eos>", 257)]
    )
    backend.post_processor = (
        processors.Sequence([processors.ByteLevel(), own]) if in_sequence else own
    )
    path.write_text(backend.to_str())
    said = {} if says is None else {"add_eos_token": says}
    config.write_text(json.dumps(json.loads(config.read_text()) | said))
    ids = load_tokenizer(ModelSource(byte_folder)).encode("x")
    assert (ids[0], ids[-1] == 257) == (256, says is not False)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor(byte_folder: Path, name: str) -> None:
    template = "{{ messages[0]['content'] }}!"
    (byte_folder / name).write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(ModelSource(byte_folder))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x!"
    given = load_tokenizer(ModelSource(byte_folder), "given")
    assert given.render_chat([{"role": "user", "content": "x"}]) == "given"


def test_templates_in_a_folder(byte_folder: Path) -> None:
    """Beside the default, and they are among the files that are downloaded."""
    (byte_folder / "chat_template.jinja").write_text("plain")
    (byte_folder / "additional_chat_templates").mkdir()
    (byte_folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(ModelSource(byte_folder))
    assert tokenizer.chat_template() == "plain"
    assert tokenizer.chat_template(has_tools=True) == "tools"
    files = [
        *("additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "config.json"),
        *("audio_tokenizer/model.safetensors", "onnx/a.json", "consolidated.safetensors"),
    ]
    allowed = filter_repo_objects(
        files, allow_patterns=_MODEL_PATTERNS, ignore_patterns=_HUB_IGNORED
    )
    assert list(allowed) == files[:3]


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        load_tokenizer(ModelSource(tmp_path))


def test_defaults(tmp_path: Path, smollm2: Tokenizer) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    generation = {"eos_token_id": [7, 5], "temperature": 0.6, "top_k": 20, "do_sample": True}
    generation |= {"max_new_tokens": 300, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    defaults = load_defaults(ModelSource(tmp_path), 2)
    assert defaults.eos_token_ids == (2, 5, 7)
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20}
    assert defaults.max_tokens == 300
    defaults = load_defaults(resolve_source(DEFAULT_MODEL), smollm2.eos_token_id)
    assert defaults == ModelDefaults(eos_token_ids=(2,), sampling={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_new_tokens", value) for value in (0, -1, 2**64, 20.5, "20", True)),
        *(("temperature", value) for value in (-1, "0.7", math.nan, math.inf, 10**400, True, [1])),
        *(("top_p", value) for value in (0, 1.5, "0.9", {})),
        *(("top_k", value) for value in (-2, 20.5, "20", 2**31)),
        *(("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", -1.0)),
        *(("eos_token_id", value) for value in (-1, "2", 2.5, 2**40, True, {"id": 2})),
    ],
)
def test_an_odd_setting_is_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    generation = {"temperature": 0, "top_k": -1, "top_p": None, name: value}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with caplog.at_level("WARNING"):
        defaults = load_defaults(ModelSource(tmp_path), 2)
    rest = {key: generation[key] for key in ("temperature", "top_k") if key != name}
    assert defaults == ModelDefaults(eos_token_ids=(2,), sampling=rest)
    [told] = caplog.messages
    assert name.replace("max_new_tokens", "max_tokens") in told or "end-of-sequence" in told


def test_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    settings: dict[str, float | int] = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
    defaults = load_defaults(gguf_with(tmp_path, {**settings, "penalty_repeat": 1.05}), 2)
    assert defaults.eos_token_ids == (2, 7)
    assert defaults.sampling == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    odd: dict[str, float | int] = {"top_p": 3.0, "temp": math.nan, "top_k": 7}
    assert load_defaults(gguf_with(tmp_path, odd), 2).sampling == {"top_k": 7}


def test_settings_of_a_gguf_file_that_nothing_reads_are_told(tmp_path: Path) -> None:
    settings = {"temp": 0.6, "mirostat": 2, "xtc_probability": 0.0}
    file = GGUFFile(gguf_with(tmp_path, settings).path)
    keys = key_use(file, {})
    assert keys.used[-1] == "general.sampling.temp"
    assert keys.without_effect == {"general.sampling.xtc_probability": "this value changes nothing"}
    assert keys.unread == ("general.sampling.mirostat",)


def gguf_with(folder: Path, sampling: dict[str, float | int]) -> ModelSource:
    """Write a GGUF file with these sampling settings, and no weights."""
    writer = GGUFWriter(folder / "model.gguf", "llama")
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    for name, value in sampling.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(folder / "model.gguf")


def wrap(metadata: dict[str, Any]) -> Tokenizer:
    """As `load_tokenizer`, and compared with what transformers makes of a copy of the backend."""
    backend, options = build_gguf_tokenizer(metadata)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    ours = Tokenizer(_Pretrained(backend, **options))
    assert ours.backend.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.eos_token_id == theirs.eos_token_id
    return ours


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["▁", *"helowrd", "he", "ll", "▁w", "lo", "or", "hell", "▁he", "▁wor", "ld", "▁hello"]
    pieces += ["▁world", "hello"]
    specials = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": specials + byte_pieces + pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": kinds + [TokenType.NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_gguf() -> None:
    tokenizer = wrap(sentencepiece_metadata())
    ids = tokenizer.encode("hello world 🎉")
    pieces = [tokenizer.backend.id_to_token(i) for i in ids]
    assert pieces[:3] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids) == "hello world 🎉"
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == " hello world 🎉".encode()
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:2]


@pytest.mark.parametrize("token_id", [-1, 2**32 - 1, "2", 2.0, True])
def test_an_id_of_no_token_is_no_special_token(
    token_id: object, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("bos", "eos", "unknown", "padding")
    broken = {f"tokenizer.ggml.{name}_token_id": token_id for name in names}
    tokenizer = wrap(sentencepiece_metadata() | broken)
    assert tokenizer.eos_token_id is None
    assert tokenizer.pretrained.pad_token is None
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    for name in names:
        assert f"no {name} token: {token_id!r} is none of its" in caplog.text


def test_a_gguf_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"chat template is \[1\]"):
        build_gguf_tokenizer(sentencepiece_metadata() | {"tokenizer.chat_template": [1]})


def test_unknown_gguf_tokenizers() -> None:
    with pytest.raises(UnsupportedModelError, match="GGUF tokenizer 'bert'"):
        build_gguf_tokenizer({"tokenizer.ggml.model": "bert"})
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'whitespace'"):
        build_gguf_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "whitespace"})


def byte_level_metadata(pre: str) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "123", "1234", "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [TokenType.NORMAL] * 259 + [TokenType.CONTROL] * 2,
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<s>", "123", "4"]),
        ("tekken", ["<s>", "1", "2", "3", "4"]),
    ],
)
def test_byte_level_gguf(pre: str, pieces: list[str]) -> None:
    tokenizer = wrap(byte_level_metadata(pre))
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("1234")] == pieces
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_torch_in_the_server_process() -> None:
    program = (
        "import sys\n"
        "from legato.checkpoint.defaults import load_defaults\n"
        "from legato.checkpoint.source import resolve_source\n"
        "from legato.language.tokenizer.tokenizer import load_tokenizer\n"
        f"source = resolve_source({DEFAULT_MODEL!r})\n"
        "tokenizer = load_tokenizer(source)\n"
        "load_defaults(source, tokenizer.eos_token_id)\n"
        "tokenizer.render_chat([{'role': 'user', 'content': 'Hi'}])\n"
        "tokenizer.decode(tokenizer.encode('Hi'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "change",
    [
        {"merges": [["a", "a"]], "continuing_subword_prefix": "##"},
        {"merges": [["a", "b"]]},
        {"merges": 5},
        {"vocab": {"a": -1}},
        {"type": "Unheard"},
    ],
)
def test_broken_tokenizers(byte_folder: Path, change: dict[str, Any]) -> None:
    """The first makes tokenizers panic."""
    path = byte_folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"] |= {"vocab": {"a": 0, "aa": 1}} | change
    path.write_text(json.dumps(contents))
    with pytest.raises(UnsupportedModelError, match="cannot read"):
        load_tokenizer(ModelSource(byte_folder))


@pytest.mark.parametrize(
    ("vocab", "complaint"),
    [
        ({"a": 0, "b": 2**32 - 1}, "'b' has id 4294967295"),
        ({"a": 0, "b": 2**20}, "'b' has id 1048576"),
        ({"a": 0, "b": 0}, "'a' and 'b' both have id 0"),
    ],
)
def test_absurd_ids(byte_folder: Path, vocab: dict[str, int], complaint: str) -> None:
    """A table up to the first of these would take 34 GB."""
    path = byte_folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"] |= {"vocab": vocab}
    contents["added_tokens"] = []
    path.write_text(json.dumps(contents))
    with pytest.raises(UnsupportedModelError, match=complaint) as info:
        load_tokenizer(ModelSource(byte_folder))
    assert str(path) in str(info.value)
