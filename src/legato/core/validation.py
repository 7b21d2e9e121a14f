"""Checks of checkpoints, which may come from anywhere. Torch-free."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from legato.core.errors import UnsupportedModelError

MAX_SIZE = 2**20
MAX_LAYERS = 1024

# Ranges of the numbers in a model's records; `DecoderSpec.check` compares them.
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Eps = Annotated[float, msgspec.Meta(ge=1e-12, le=0.1)]


def check_sizes(path: Path, num_layers: object, **sizes: object) -> None:
    """Refuse absurd sizes before transformers, or Legato, makes lists of that length.

    They are compared with the tensors later, before any tensor is loaded.

    Args:
        path: path of the description.
        sizes: key a name for messages, value a size of some tensor or a number of heads; None if
            the description has none.

    Raises:
        UnsupportedModelError: a size is not a positive integer, or larger than any model's.
    """
    limits = {"the number of layers": (num_layers, MAX_LAYERS)}
    limits |= {name: (size, MAX_SIZE) for name, size in sizes.items()}
    for name, (size, limit) in limits.items():
        if size is not None and not (type(size) is int and 0 < size <= limit):
            raise UnsupportedModelError(f"cannot read {path}: {name} is {size!r}")


def check_token_ids(path: Path, vocab: Mapping[str, int]) -> None:
    """Refuse absurd token ids before tables as long as the largest id are made.

    Args:
        path: path of the tokenizer.
        vocab: key a token's text, value its id.

    Raises:
        UnsupportedModelError: an id is too large, or two tokens share one.
    """
    if max(vocab.values(), default=0) >= MAX_SIZE:
        text, token_id = max(vocab.items(), key=lambda item: item[1])
        raise UnsupportedModelError(
            f"cannot read {path}: the token {reprlib.repr(text)} has id {token_id}, of {MAX_SIZE} "
            "at most"
        )
    if len(set(vocab.values())) < len(vocab):
        tokens: dict[int, str] = {}  # key the id
        for text, token_id in sorted(vocab.items()):
            other = tokens.setdefault(token_id, text)
            if other != text:
                names = f"{reprlib.repr(other)} and {reprlib.repr(text)}"
                raise UnsupportedModelError(f"cannot read {path}: {names} both have id {token_id}")


def check_fields(values: msgspec.Struct) -> None:
    """Check each field against its annotation; constructors of structs do not.

    Raises:
        UnsupportedModelError: a field is of another type, or out of range.
    """
    for field in msgspec.structs.fields(values):
        value = getattr(values, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            reason = f"{field.name} is {reprlib.repr(value)}: {error}"
            raise UnsupportedModelError(reason) from error


@contextmanager
def refusing_what_fails(path: Path) -> Iterator[None]:
    """Turn exceptions of transformers and tokenizers into refusals of a broken description.

    They check little, so a wrong type or a zero can raise any exception, sometimes with a message
    of several lines. A refusal that does not name the file gets its path.

    Raises:
        UnsupportedModelError: in place of any other exception.
    """
    try:
        yield
    except MemoryError:
        raise
    except UnsupportedModelError as error:
        if str(path) in str(error):
            raise
        raise UnsupportedModelError(f"{error} ({path})") from error
    except KeyError as error:
        raise UnsupportedModelError(f"{path} lacks {error}") from error
    except BaseException as error:
        # A panic of tokenizers' Rust is no Exception, and its class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(f"cannot read {path}: {reason}") from error
        raise
