"""Requests that wait to be sent to an engine, and how many are sent at a time."""

from collections import OrderedDict
from typing import Generic, TypeVar

from legato.core.request import AddRequest
from legato.core.rotation import Rotation

MAX_SENT = 64
"""Most requests that are sent to an engine before it takes them."""
MAX_SENT_TOKENS = 64 * 2**10
"""Most prompt tokens of these together; a single request may have more."""

_Message = TypeVar("_Message")


class PendingRequests(Generic[_Message]):
    """Requests that wait to be sent: tenants take turns, and so do the prompts of a tenant.

    A request for very many completions delays other requests by one completion of each prompt at
    most. A request that is aborted while it waits is never sent.
    """

    def __init__(self) -> None:
        self._messages: dict[str, tuple[AddRequest, _Message]] = {}  # key: request id
        # Key: the tenant, in the order of turns. Items are request ids, aborted ones included, and
        # their keys are the prompts' names.
        self._prompts: OrderedDict[str, Rotation[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, request: AddRequest, message: _Message) -> None:
        """Add a request.

        Args:
            message: the message to send for it.
        """
        self._messages[request.request_id] = request, message
        prompts = self._prompts.setdefault(request.service.tenant, Rotation())
        prompts.add(request.request_id.rpartition("-")[0], request.request_id)

    def drop(self, request_id: str) -> bool:
        """Remove a request; return whether it was waiting."""
        return self._messages.pop(request_id, None) is not None

    def take(self, max_requests: int, max_tokens: int) -> list[_Message]:
        """Remove and return the next messages.

        Args:
            max_tokens: limit on prompt tokens; the last message may exceed it.
        """
        taken: list[_Message] = []
        num_tokens = 0
        while len(taken) < max_requests and num_tokens < max_tokens:
            found = self._next()
            if found is None:
                break
            request, message = found
            taken.append(message)
            num_tokens += len(request.prompt_token_ids)
        return taken

    def _next(self) -> tuple[AddRequest, _Message] | None:
        while self._prompts:
            tenant, prompts = next(iter(self._prompts.items()))
            request_id = prompts.take()
            while request_id is not None and request_id not in self._messages:
                request_id = prompts.take()
            if prompts:
                self._prompts.move_to_end(tenant)
            else:
                del self._prompts[tenant]
            if request_id is not None:
                return self._messages.pop(request_id)
        return None
