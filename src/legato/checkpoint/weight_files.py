"""Tensors in the safetensors files of a folder, and quantized matrices made of some of them."""

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from legato.checkpoint.json_file import read_json
from legato.checkpoint.quantized_matrices import QuantizedMatrices
from legato.checkpoint.scheme import Header, Scheme, num_bytes
from legato.core.errors import UnsupportedModelError
from legato.model.model import NamedWeights
from legato.model.quantization import few_rows, held_bytes

logger = logging.getLogger(__name__)

ShapesAfter = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, tuple[int, ...]]]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale"),
    *(f".{module}_proj.output_scale" for module in ("q", "k", "v", "qkv")),
)
"""Ends of the names of scales of a cache in FP8, which no cache here has."""
_MOST_TENSORS = 2**20
_MAPPED_BYTES = 2**26
"""Of the files that may be in memory beside the weights that are made of them."""
_MAPPINGS = Path("/proc/self/maps")
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class WeightFiles:
    """The weights in a folder's open files.

    Args:
        schemes: of the quantized matrices; empty if there are none.

    Attributes:
        headers: of the tensors in the files; key the name.
        others: headers of the tensors that are no parts of quantized matrices; key the name.
        shapes: of the weights, matrices that are quantized included; key the name.

    Raises:
        UnsupportedModelError: files are missing or broken, or the weights are pickled, or of types
            that Legato does not read.
    """

    def __init__(self, folder: Path, schemes: Sequence[Scheme]) -> None:
        self._file_of: dict[str, Any] = {}
        self.headers: dict[str, Header] = {}
        self._paths = _weight_files(folder)
        for path in self._paths:
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(_CACHE_SCALES):
                    continue
                tensor = file.get_slice(name)
                self._file_of[name] = file
                self.headers[name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))
            if len(self.headers) > _MOST_TENSORS:
                raise UnsupportedModelError(
                    f"{folder} has over {_MOST_TENSORS:,} tensors, which no model has"
                )
        self.others = self.headers
        self._matrices: QuantizedMatrices | None = None
        if schemes:
            self._matrices = QuantizedMatrices(str(folder), schemes, self.headers, self.read)
            self.others = self._matrices.others
        _check_types(self.others)
        self.shapes: dict[str, tuple[int, ...]] = {
            name: header.shape for name, header in self.others.items()
        }
        if self._matrices is not None:
            self.shapes |= self._matrices.shapes

    @property
    def kept_bytes(self) -> dict[str, int]:
        """Size of each tensor in the files; key the name."""
        return {name: num_bytes(header) for name, header in self.headers.items()}

    def dtype(self, said: torch.dtype | None) -> torch.dtype:
        """Return the dtype that the model computes in.

        Args:
            said: the dtype that the configuration names; None if it names none.
        """
        return torch.bfloat16 if self._matrices is not None else said or _used_dtype(self.headers)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor of the files."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def has_copies(
        self, names: tuple[str, str], shape: tuple[int, ...], shapes_after: ShapesAfter
    ) -> bool:
        """Whether two weights, such as an embedding matrix and an output projection, are equal.

        Reads a few rows at a time, up to the first that differ. A matrix that is quantized is no
        copy. A warning says that two weights differ.

        Args:
            names: of the weights, as the model has them.
            shape: of one of them.
            shapes_after: from the shapes of tensors to those of the weights made of them.
        """
        alike = [own for own, header in self.others.items() if header.shape == shape]
        stored = {name: own for own in alike for name in shapes_after({own: shape})}
        pair = [stored[name] for name in names if name in stored]
        are_equal = len(pair) == len(names) and all(
            torch.equal(*(self._file_of[name].get_slice(name)[rows] for name in pair))
            for rows in few_rows(shape[0])
        )
        if not are_equal:
            logger.warning("%s has a value of its own, though the description ties it", names[1])
        return are_equal

    def weights(self, others: Iterable[str]) -> NamedWeights:
        """Yield the tensors of these names, then the quantized matrices.

        Gives back the files' pages every few of them.
        """
        tensors: NamedWeights = ((name, self.read(name)) for name in others)
        num_bytes = 0
        for name, weight in (
            tensors if self._matrices is None else chain(tensors, self._matrices.read())
        ):
            yield name, weight
            num_bytes += held_bytes(weight)
            if num_bytes > _MAPPED_BYTES:
                release(self._paths)
                num_bytes = 0
        release(self._paths)


def release(paths: Iterable[Path]) -> None:
    """Give back the memory of files' mapped pages. A page that is read again is mapped again.

    Pages that are locked stay in memory, and those of systems other than Linux.
    """
    if not _MAPPINGS.exists():
        return
    names = {str(path.resolve()) for path in paths}
    libc = ctypes.CDLL(None)
    for line in _MAPPINGS.read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        if name in names:
            first, end = (int(address, 16) for address in place.split("-"))
            size = ctypes.c_size_t(end - first)
            libc.madvise(ctypes.c_void_p(first), size, mmap.MADV_DONTNEED)


def dtype_named(name: object) -> torch.dtype | None:
    """Return the dtype of that name; None if Legato does not compute in it."""
    return next((dtype for dtype in _FLOAT_TYPES.values() if str(dtype) == f"torch.{name}"), None)


def _weight_files(folder: Path) -> list[Path]:
    index = read_json(folder / _INDEX_FILE)
    names = _shards(folder, index) if index else [_SINGLE_FILE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and (folder / _SINGLE_FILE).is_file():
        logger.warning("%s is not used: it names files that are not here", folder / _INDEX_FILE)
        return [folder / _SINGLE_FILE]
    if not missing:
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedModelError(
            f"{folder} has only pickled weights, which can run code when loaded; convert them to "
            "safetensors with transformers' save_pretrained"
        )
    raise UnsupportedModelError(f"{folder} lacks {', '.join(missing)}")


def _shards(folder: Path, index: dict[str, Any]) -> list[str]:
    """Return the files that an index names; all must be in the index's folder."""
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in shards.values()
    ):
        raise UnsupportedModelError(f"{folder / _INDEX_FILE} does not name files of its folder")
    return sorted(set(shards.values()))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise UnsupportedModelError(
            f"{path} is not a readable safetensors file: {error}"
        ) from error


def _check_types(headers: Mapping[str, Header]) -> None:
    """Raises `UnsupportedModelError` if a tensor has no floating type."""
    for name, header in headers.items():
        if header.dtype not in _FLOAT_TYPES:
            raise UnsupportedModelError(
                f"{name} is of type {header.dtype}; such weights are not supported"
            )


def _used_dtype(headers: Mapping[str, Header]) -> torch.dtype:
    """Return the dtype of the weights, or the first in `_FLOAT_TYPES` of several."""
    used = {header.dtype for name, header in headers.items() if name.endswith(".weight")}
    return next((dtype for name, dtype in _FLOAT_TYPES.items() if name in used), torch.float32)
