"""Bodies that clients have compressed."""

import zlib
from http import HTTPStatus

from starlette.datastructures import Headers

from legato.server.http.errors import body_too_large, invalid_request

_GZIP = zlib.MAX_WBITS | 16


def is_compressed(headers: Headers) -> bool:
    """Whether a body is in gzip; raises `ApiError` if it is in another encoding."""
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("gzip", "x-gzip", "identity"):
        raise invalid_request(
            "a body may be compressed with gzip only",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            {"Accept-Encoding": "gzip"},
        )
    return encoding != "identity"


def decompressed(body: bytearray, max_body_bytes: int) -> bytearray:
    """Decompress a body.

    Raises:
        ApiError: it is not gzip, or larger than `max_body_bytes` after that.
    """
    reader = zlib.decompressobj(_GZIP)
    try:
        data = bytearray(reader.decompress(body, max_body_bytes + 1))
    except zlib.error as error:
        raise invalid_request(f"the body is not gzip: {error}") from error
    if len(data) > max_body_bytes:
        raise body_too_large(max_body_bytes)
    if not reader.eof or reader.unused_data:
        raise invalid_request("the body is not gzip: it ends too early or too late")
    return data
