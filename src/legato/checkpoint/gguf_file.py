"""Reads a GGUF file's metadata and tensors. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` makes an array
of every string, which takes seconds for a vocabulary; this module reads the header in one pass.
"""

import math
import mmap
import struct
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from legato.checkpoint.gguf_blocks import GgufBlocks, split_blocks
from legato.checkpoint.source import gguf_parts
from legato.core.errors import UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Far more than any model has, yet few enough to hold as Python objects.
_MAX_METADATA = 2**16
_MAX_TENSORS = 2**17
_MAX_ITEMS = 2**23  # of all arrays
_MAX_DIMENSIONS = 4
_ROWS_A_TIME = 256
_COUNT = "split.count"
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
"""Without it, Linux maps no file for writing that is larger than the memory."""
_SCALAR_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


class GGUFTensor(msgspec.Struct, frozen=True):
    """Place and type of one tensor.

    Attributes:
        shape: slowest dimension first, as in torch; the file has the reverse order.
        offset: bytes from the start of the file.
        part: index of the file, if a model is split.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    part: int = 0

    @property
    def num_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // int(block_size) * int(block_bytes)


class GGUFFile:
    """A memory-mapped GGUF file, with all parts of a model that is split.

    Attributes:
        path: of the first part.
        metadata: key the metadata key, value a number, string, bool or list of these; of the first
            part, since others have none of the model.
        tensors: key the tensor's name in the file, value its place.
        read_keys: metadata keys that `get` and `needed` were asked for.

    Raises:
        UnsupportedModelError: not a little-endian GGUF file of version 2 or 3, a tensor that
            extends beyond the file, two that overlap, or a part that is missing or of another
            model. Reading takes memory of at most a multiple of the files' size, even with a false
            header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: list[mmap.mmap] = []
        self.read_keys: set[str] = set()
        self.metadata, self.tensors = self._opened(path)
        count = self.metadata.get(_COUNT, 0)
        paths = gguf_parts(path)
        if type(count) is not int or max(count, 1) != len(paths):
            raise UnsupportedModelError(
                f"{path}: {_COUNT} is {count}, but by its name it is one of {len(paths)}; the "
                "parts of a model need the names that llama.cpp gave them"
            )
        for own in paths[1:]:
            self._add(own)
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if count > 1 and expected != len(self.tensors):
            raise UnsupportedModelError(
                f"{path}: its parts have {len(self.tensors)} tensors instead of {expected}"
            )

    def _add(self, path: Path) -> None:
        """Open a further part."""
        index = len(self._parts)
        if not path.is_file():
            raise UnsupportedModelError(f"{self.path} lacks its part {path.name}")
        metadata, tensors = self._opened(path)
        found = metadata.get("split.no"), metadata.get(_COUNT)
        if found != (index, self.metadata[_COUNT]):
            raise UnsupportedModelError(
                f"{path}: split.no and {_COUNT} are {found} instead of "
                f"{(index, self.metadata[_COUNT])}"
            )
        if twice := sorted(tensors.keys() & self.tensors.keys()):
            raise UnsupportedModelError(f"{path}: {twice[0]} is in another part, too")
        self.tensors |= tensors

    def _opened(self, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Map a file and check its header."""
        with path.open("rb") as file:
            try:
                # Private pages, since torch would warn about read-only ones.
                flags = mmap.MAP_PRIVATE | _NO_RESERVE
                data = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            except ValueError as error:
                raise UnsupportedModelError(f"{path} is empty") from error
        try:
            metadata, tensors = _Header(data, len(self._parts)).read()
        except (struct.error, ValueError, KeyError) as error:
            raise UnsupportedModelError(f"{path} is not a readable GGUF file: {error}") from error
        self._parts.append(data)
        for name, tensor in tensors.items():
            if tensor.offset + tensor.num_bytes > len(data):
                raise UnsupportedModelError(f"{path} is cut short: {name} lies past its end")
        in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
        for (name, tensor), (following, other) in pairwise(in_order):
            if tensor.offset + tensor.num_bytes > other.offset:
                raise UnsupportedModelError(f"{path}: the tensors {name} and {following} overlap")
        return metadata, tensors

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value `<architecture>.<key>`."""
        return self.metadata.get(self._asked(key), default)

    def needed(self, key: str) -> Any:
        """Return the metadata value `<architecture>.<key>`; raises `KeyError` if there is none."""
        return self.metadata[self._asked(key)]

    def _asked(self, key: str) -> str:
        name = f"{self.architecture}.{key}"
        self.read_keys.add(name)
        return name

    def read(self, name: str) -> np.ndarray:
        """Dequantize a tensor to float32 (F16 tensors stay float16).

        Raises:
            UnsupportedModelError: the tensor's type cannot be dequantized.
        """
        tensor, raw = self.tensors[name], self.read_bytes(name)
        if tensor.type == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape)
        if tensor.type == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        rows = raw.reshape(math.prod(tensor.shape[:-1]), -1)
        values = np.empty((len(rows), math.prod(tensor.shape[-1:])), np.float32)
        try:
            for first in range(0, len(rows), _ROWS_A_TIME):
                few = rows[first : first + _ROWS_A_TIME]
                values[first : first + _ROWS_A_TIME] = dequantize(few, tensor.type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: {name} has the unsupported type {tensor.type.name}"
            ) from error
        return values.reshape(tensor.shape)

    def read_blocks(self, name: str) -> GgufBlocks | None:
        """Return a tensor's codes and scales; None if it is not quantized in such blocks."""
        kind = self.tensors[name].type
        return split_blocks(self.read_bytes(name).reshape(-1, GGML_QUANT_SIZES[kind][1]), kind)

    def release(self) -> None:
        """Give back the memory of the file's pages. A page that is read again is mapped again.

        Pages that are locked stay in memory.
        """
        for data in self._parts:
            with suppress(OSError):
                data.madvise(mmap.MADV_DONTNEED)

    def read_bytes(self, name: str) -> np.ndarray:
        """Return a tensor's bytes in the file, which the result maps."""
        tensor = self.tensors[name]
        return np.frombuffer(self._parts[tensor.part], np.uint8, tensor.num_bytes, tensor.offset)


class _Header:
    """A read position in the header."""

    def __init__(self, data: mmap.mmap, part: int) -> None:
        self._data, self._part = data, part
        self._position = 0
        self._num_items = 0  # in all arrays read so far

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not start with the letters GGUF")
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} instead of {_VERSIONS}")
        num_tensors, num_metadata = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MAX_TENSORS or num_metadata > _MAX_METADATA:
            raise ValueError(f"it claims {num_tensors} tensors and {num_metadata} metadata entries")
        metadata = {self._string(): self._value(self._type()) for _ in range(num_metadata)}
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
            raise ValueError(f"its alignment is {alignment!r}, which is no power of two")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, tensor in entries:
            if name in tensors or tensor.offset % alignment:
                raise ValueError(f"tensor {name!r} is not where it should be, or twice")
            tensors[name] = msgspec.structs.replace(tensor, offset=start + tensor.offset)
        return metadata, tensors

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _type(self) -> GGUFValueType:
        return GGUFValueType(self._scalar("I"))

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._position
        if start + length > len(self._data):
            raise ValueError("it is cut short")
        self._position += length
        return self._data[start : self._position].decode("utf-8", errors="replace")

    def _value(self, value_type: GGUFValueType) -> Any:
        if value_type == GGUFValueType.STRING:
            return self._string()
        if value_type == GGUFValueType.ARRAY:
            return self._array(self._type(), self._scalar("Q"))
        return self._scalar(_SCALAR_FORMATS[value_type])

    def _array(self, item_type: GGUFValueType, length: int) -> list[Any]:
        self._num_items += length
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"its arrays have over {_MAX_ITEMS} items")
        if item_type == GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays")
        if item_type == GGUFValueType.STRING:
            return self._strings(length)
        numbers = struct.Struct(f"<{length}{_SCALAR_FORMATS[item_type]}")
        start, self._position = self._position, self._position + numbers.size
        return list(numbers.unpack_from(self._data, start))

    def _strings(self, length: int) -> list[str]:
        """Read `length` strings: `_string` inlined, since a vocabulary has a hundred thousand."""
        data, position, size = self._data, self._position, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(length):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > size:
                raise ValueError("it is cut short")
            strings.append(data[start:position].decode("utf-8", errors="replace"))
        self._position = position
        return strings

    def _tensor(self) -> tuple[str, GGUFTensor]:
        name, num_dimensions = self._string(), self._scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = [self._scalar("Q") for _ in range(num_dimensions)]
        tensor_type = GGMLQuantizationType(self._scalar("I"))
        if 0 in dimensions or (dimensions or [1])[0] % GGML_QUANT_SIZES[tensor_type][0]:
            raise ValueError(f"tensor {name!r} of type {tensor_type.name} has shape {dimensions}")
        return name, GGUFTensor(
            tuple(reversed(dimensions)), tensor_type, self._scalar("Q"), self._part
        )
