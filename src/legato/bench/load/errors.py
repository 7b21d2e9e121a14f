"""How a request to a server under measurement can end other than well."""


class RequestError(Exception):
    """The server did not finish the request, or cannot be reached."""


class RefusedError(RequestError):
    """The server did not take the request (429).

    Attributes:
        retry_after_s: when it may be sent again, where the server said so.
    """

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
