"""The `Warning` header of answers: what of their requests is ignored."""

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.observe.metrics.server_metrics import ServerMetrics

_MISCELLANEOUS = 299
"""The warn-code of RFC 7234 for a lasting warning of any kind."""
_MAX_CHARS = 1000


class AnswerWarnings:
    """Puts the warnings about a request into its answer's header, and counts such answers.

    Handlers add to the list `scope["state"]["warnings"]` before the answer begins.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        warnings: list[str] = []
        scope.setdefault("state", {})["warnings"] = warnings

        async def send_with_warnings(message: Message) -> None:
            if warnings and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Warning"] = warning_header(warnings)
                self._metrics.requests.warnings.inc()
            await send(message)

        await self._app(scope, receive, send_with_warnings)


def warning_header(warnings: Sequence[str]) -> str:
    """Return the header's value. Warnings may quote the client: only visible ASCII is kept."""
    text = "; ".join(warnings)[:_MAX_CHARS]
    visible = "".join(char if " " <= char <= "~" else "?" for char in text)
    escaped = visible.replace("\\", "\\\\").replace('"', '\\"')
    return f'{_MISCELLANEOUS} legato "{escaped}"'
