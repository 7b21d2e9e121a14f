"""Requests written by hand: an HTTP client's own milliseconds would count as the server's."""


def post(path: str, body: bytes, **headers: str) -> bytes:
    """A POST of JSON, as it goes over the wire.

    Args:
        headers: more of them; an underscore in a name stands for a hyphen.
    """
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
