"""What the server knows of an HTTP request before it reads the body."""

import logging
from dataclasses import dataclass, field

_MAX_WARNING_CHARS = 1000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The identity of an HTTP request, and the time it came.

    Attributes:
        request_id: the client's, or one made for it; two requests may share it.
        answer_id: a unique id, used with a prefix in the ids of the answer.
        received_s: when its first bytes came, on the clock of `time.monotonic`.
        trace_context: its W3C trace context headers; key the name.
        tenant: the tenant of its API key; None if the key names none.
        cache_owner: that tenant, if it shares no cached blocks with others; else None.
        warnings: for the answer and its `Warning` header, each once.
        cut_choices: the answer's choices whose thinking was ended at its budget.
    """

    request_id: str
    answer_id: str
    received_s: float
    trace_context: dict[str, str]
    tenant: str | None = None
    cache_owner: str | None = None
    warnings: list[str] = field(default_factory=list)
    cut_choices: set[int] = field(default_factory=set)

    def named(self, request_id: str | None) -> str:
        """Return the client's name of the request: of its header, else this one, else a new one."""
        is_sent = self.request_id != self.answer_id
        return self.request_id if is_sent or request_id is None else request_id

    def warn(self, text: str) -> None:
        """Log a warning and add it to the answer, once. Args: text: may quote the client."""
        shown = "".join(char if char.isprintable() else "?" for char in text[:_MAX_WARNING_CHARS])
        if shown not in self.warnings:
            self.warnings.append(shown)
            logger.info("%s", shown)  # the line of log has the request's id
