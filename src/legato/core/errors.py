"""Errors that belong to the user's input rather than to Legato."""


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
