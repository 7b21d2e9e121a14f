"""Reading a GGUF file: its metadata and its tensors. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` makes an array
of every string, which takes seconds for a vocabulary; this reads the header in one pass.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from legato.core.errors import UnsupportedModelError
from legato.model.gguf_blocks import Blocks, split_blocks

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
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
        shape: slowest dimension first, as in torch; the file has it the other way round.
        offset: bytes from the start of the file.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int


class GGUFFile:
    """A memory-mapped GGUF file.

    Attributes:
        metadata: key the metadata key, value a number, string, bool or list of these.
        tensors: key the tensor's name in the file, value its place.

    Raises:
        UnsupportedModelError: not a little-endian GGUF file of version 2 or 3, or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                # Private pages rather than read-only ones, which torch would warn about.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise UnsupportedModelError(f"{path} is empty") from error
        header = _Header(self._data)
        try:
            self.metadata, self.tensors = header.read()
        except (struct.error, ValueError, KeyError) as error:
            raise UnsupportedModelError(f"{path} is not a readable GGUF file: {error}") from error

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def read(self, name: str) -> np.ndarray:
        """Dequantize one tensor to float32 (numbers stored as F16 stay float16).

        Raises:
            UnsupportedModelError: the file ends before the tensor, or its type is unknown.
        """
        tensor, raw = self.tensors[name], self._bytes(name)
        if tensor.type == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape)
        rows = raw.view(np.float32) if tensor.type == GGMLQuantizationType.F32 else raw
        try:
            values = dequantize(rows.reshape(*tensor.shape[:-1], -1), tensor.type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: {name} has the unsupported type {tensor.type.name}"
            ) from error
        return np.asarray(values).reshape(tensor.shape)

    def read_blocks(self, name: str) -> Blocks | None:
        """One tensor as it is quantized; None if it is not, or in a way that has no such blocks.

        Raises:
            UnsupportedModelError: the file ends before the tensor.
        """
        kind = self.tensors[name].type
        return split_blocks(self._bytes(name).reshape(-1, GGML_QUANT_SIZES[kind][1]), kind)

    def _bytes(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
        num_bytes = math.prod(tensor.shape) // block_size * block_bytes
        if tensor.offset + num_bytes > len(self._data):
            raise UnsupportedModelError(f"{self.path} is cut short: {name} lies past its end")
        return np.frombuffer(self._data, np.uint8, num_bytes, tensor.offset)


class _Header:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not start with the letters GGUF")
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} instead of {_VERSIONS}")
        num_tensors, num_metadata = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._type()) for _ in range(num_metadata)}
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = math.ceil(self._position / alignment) * alignment
        tensors = {
            name: msgspec.structs.replace(tensor, offset=start + tensor.offset)
            for name, tensor in entries
        }
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
            item_type, length = self._type(), self._scalar("Q")
            return [self._value(item_type) for _ in range(length)]
        return self._scalar(_SCALAR_FORMATS[value_type])

    def _tensor(self) -> tuple[str, GGUFTensor]:
        name = self._string()
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        tensor_type = GGMLQuantizationType(self._scalar("I"))
        return name, GGUFTensor(tuple(reversed(dimensions)), tensor_type, self._scalar("Q"))
