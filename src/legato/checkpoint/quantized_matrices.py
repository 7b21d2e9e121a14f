"""Finds the quantized matrices among a checkpoint's tensors, checks them and reads them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from legato.checkpoint.scheme import Header, Scheme, check_parts
from legato.core.errors import UnsupportedModelError
from legato.model.model import NamedWeights


class QuantizedMatrices:
    """The matrices that some schemes hold.

    Args:
        checkpoint: for messages.
        schemes: the first one that holds a module reads it.
        headers: of the checkpoint's tensors; key the name.
        load: from a name to the tensor.

    Attributes:
        shapes: key the name that the matrix would have if it were not quantized.
        others: headers of the tensors that are no parts of matrices; key the name.

    Raises:
        UnsupportedModelError: a part of a matrix is missing, or has another shape or type.
    """

    def __init__(
        self,
        checkpoint: str,
        schemes: Sequence[Scheme],
        headers: Mapping[str, Header],
        load: Callable[[str], torch.Tensor],
    ) -> None:
        self._checkpoint, self._load = checkpoint, load
        self._parts: dict[str, dict[str, Header]] = {}  # key the module
        self._schemes: dict[str, Scheme] = {}  # key the module
        for scheme in schemes:
            for module in _modules(headers, scheme):
                own = {
                    suffix: headers[part]
                    for suffix in scheme.suffixes
                    if (part := _name(module, suffix)) in headers
                }
                found = None if module in self._parts else scheme.of(own)
                if found is not None:
                    self._parts[module], self._schemes[module] = own, found
        taken = {_name(module, suffix) for module, own in self._parts.items() for suffix in own}
        self.others = {name: header for name, header in headers.items() if name not in taken}
        self.shapes = {
            f"{module}.weight": self._checked_size(module, own)
            for module, own in self._parts.items()
        }

    def read(self) -> NamedWeights:
        """Yield the matrices, still quantized where their form allows it."""
        for module, headers in self._parts.items():
            parts = {suffix: self._load(_name(module, suffix)) for suffix in headers}
            try:
                yield f"{module}.weight", self._schemes[module].read(parts)
            except (UnsupportedModelError, RuntimeError, KeyError) as error:
                raise self._refusal(module, error) from error

    def _checked_size(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        scheme = self._schemes[module]
        try:
            size = scheme.size(headers, lambda suffix: self._load(_name(module, suffix)))
            if min(size) < 1:
                raise UnsupportedModelError(f"it has {size[0]:,} outputs and {size[1]:,} inputs")
            parts = scheme.parts(*size)
        except (UnsupportedModelError, ValueError, KeyError) as error:
            raise self._refusal(module, error) from error
        check_parts(f"{self._checkpoint}: {module}", headers, parts)
        return size

    def _refusal(self, module: str, error: Exception) -> UnsupportedModelError:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return UnsupportedModelError(f"{self._checkpoint}: {module} cannot be read: {reason}")


def _modules(headers: Mapping[str, Header], scheme: Scheme) -> Iterator[str]:
    """Yield the modules that have a marker of a scheme."""
    for name in headers:
        for marker in scheme.markers:
            ending = _name("", marker)
            if name.endswith(ending):
                yield name.removesuffix(ending)


def _name(module: str, suffix: str) -> str:
    """Return the name of a tensor; a suffix with an underscore is a part of its last word."""
    if not suffix:
        return module
    return f"{module}{suffix}" if suffix.startswith("_") else f"{module}.{suffix}"
