"""Which files a name of a model, or of a tokenizer, stands for."""

from pathlib import Path

import pytest

from legato.checkpoint.source import resolve_source, resolve_tokenizer
from legato.core.config import DEFAULT_MODEL, ModelConfig
from legato.core.errors import ConfigError
from legato.language.tokenizer.loading import load_text, text_source


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("names", "chosen", "passed_over"),
    [
        (["config.json", "model.safetensors"], ".", []),
        (["config.json", "model.safetensors", "b.gguf", "a.gguf"], ".", ["a.gguf", "b.gguf"]),
        # As repositories of GGUF files have it.
        (["config.json", "tokenizer.json", "a.gguf"], "a.gguf", []),
        (["a.gguf"], "a.gguf", []),
        (["config.json"], ".", []),
        ([], ".", []),
    ],
)
def test_what_is_chosen_of_a_folder(
    tmp_path: Path, names: list[str], chosen: str, passed_over: list[str]
) -> None:
    source = resolve_source(str(folder_of(tmp_path, *names)))
    assert source.path == (tmp_path / chosen).resolve()
    assert source.passed_over == passed_over


def test_several_files_to_choose_from(tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, "q4.gguf", "q8.gguf"))
    with pytest.raises(ConfigError, match=r"name the one to load: q4\.gguf, q8\.gguf"):
        resolve_source(folder)


def test_a_tokenizer_goes_by_its_own_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "tokenizer.json", "q4.gguf", "q8.gguf")
    assert resolve_tokenizer(str(folder)).path == tmp_path.resolve()
    (folder / "tokenizer.json").unlink()
    (folder / "q8.gguf").unlink()
    assert resolve_tokenizer(str(folder)).is_gguf


def test_no_home_folder() -> None:
    with pytest.raises(ConfigError, match="there is no model at '~nobody/m'"):
        resolve_source("~nobody/m")


def test_only_hub_models_have_revisions(tmp_path: Path) -> None:
    for model in (DEFAULT_MODEL, str(tmp_path)):
        with pytest.raises(ConfigError, match="only hub models have revisions"):
            resolve_source(model, "main")


def test_another_tokenizer_and_template(tmp_path: Path) -> None:
    source = resolve_source(DEFAULT_MODEL)
    own, own_defaults = load_text(text_source(ModelConfig(), source))
    folder, template = tmp_path / "other", tmp_path / "template.jinja"
    own.pretrained.save_pretrained(folder)
    template.write_text("{{ messages[0].content }}!")
    for given in (str(template), template.read_text()):
        config = ModelConfig(tokenizer=str(folder), chat_template=given)
        tokenizer, defaults = load_text(text_source(config, source))
        assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"
        assert tokenizer.encode("Once upon a time") == own.encode("Once upon a time")
        assert defaults == own_defaults


def test_no_such_template(tmp_path: Path) -> None:
    config = ModelConfig(chat_template=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        text_source(config, resolve_source(DEFAULT_MODEL))
