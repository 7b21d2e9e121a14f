"""Ways in which a valid request can still go unserved."""

from legato.core.outputs import RefusalReason, RequestOutput


class OverloadedError(Exception):
    """Too many requests are waiting, for the server or for the SLO.

    Attributes:
        retry_after_s: when to try again.
    """

    def __init__(self, message: str, *, reason: RefusalReason, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class RequestFailedError(Exception):
    """The request could not be computed; other requests are unharmed."""


class NoTokenLeftError(RequestFailedError):
    """What the request asks for leaves it no token to go on with, or takes too much to tell."""


def failure(output: RequestOutput) -> RequestFailedError:
    """What a request's end by an error is to its client."""
    kind = NoTokenLeftError if output.is_asked_for else RequestFailedError
    return kind(output.error or "the request failed")


class EngineFaultError(Exception):
    """The engine computes nothing any more, whatever the request."""


class EngineDeadError(Exception):
    """The engine process is gone, or could not start.

    Attributes:
        retry_after_s: when another one is expected to serve, if one is being started.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReaderError(Exception):
    """Whoever reads a stream is so far behind that it was ended; other streams are unharmed."""
