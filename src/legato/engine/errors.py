"""Errors that end a valid request."""

from legato.core.outputs import RefusalReason, RequestOutput


class OverloadedError(Exception):
    """Too many requests are waiting, or the SLO cannot be met.

    Attributes:
        retry_after_s: when to try again.
    """

    def __init__(self, message: str, *, reason: RefusalReason, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class RequestFailedError(Exception):
    """The request could not be computed; other requests are not affected."""


class NoTokenLeftError(RequestFailedError):
    """The request's own constraints leave no valid next token, or checking them takes too long."""


def failure(output: RequestOutput) -> RequestFailedError:
    """Return the exception for a request that ended by an error."""
    kind = NoTokenLeftError if output.is_asked_for else RequestFailedError
    return kind(output.error or "the request failed")


class EngineFaultError(Exception):
    """The engine can compute no more requests."""


class EngineDeadError(Exception):
    """The engine process is gone, or could not start.

    Attributes:
        retry_after_s: when a new engine should serve, if one is being started.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReaderError(Exception):
    """A stream was ended because its client reads too slowly; other streams are not affected."""
