"""Errors that belong to the user's input rather than to Legato."""

from collections.abc import Iterator
from contextlib import contextmanager


class InvalidRequestError(ValueError):
    """A request that can never be served as asked.

    Attributes:
        param: name of the offending request field; None if no single field is to blame.
        code: a short machine-readable reason, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnsupportedModelError(ValueError):
    """A checkpoint that Legato cannot run: its architecture, quantization or format."""


class ConfigError(ValueError):
    """Settings that contradict each other or the machine."""


@contextmanager
def naming_fields(**names: str) -> Iterator[None]:
    """Rename the field that an error blames from the engine's name to the client's.

    Args:
        names: key the engine's name, value the client's.
    """
    try:
        yield
    except InvalidRequestError as error:
        error.param = names.get(error.param, error.param) if error.param else None
        raise
