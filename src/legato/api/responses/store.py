"""Stores responses in memory, within bounds, for later turns."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from http import HTTPStatus

import msgspec

from legato.api.http.errors import ApiError, ErrorDetail, not_found
from legato.api.job import InputItem, NeedsStored
from legato.api.responses.background import BackgroundRun

_PREFIX = "resp_"


class StoredResponse(msgspec.Struct):
    """One response.

    Attributes:
        body: the response in JSON, in pieces; empty while it is made in the background.
        run: of a response in the background.
    """

    id: str
    body: Sequence[bytes]
    input: tuple[InputItem, ...]
    previous_id: str | None
    run: BackgroundRun | None = None

    @property
    def num_bytes(self) -> int:
        num_bytes = sum(map(len, self.body)) + sum(len(item.data) for item in self.input)
        if self.run is None:
            return num_bytes
        log = self.run.log
        return num_bytes + (self.run.num_bytes if not self.body else log.num_bytes if log else 0)

    def input_items(self) -> list[tuple[str, list[bytes]]]:
        """Return the ids of its input items, each with the pieces of the item's JSON."""
        suffix = self.id.removeprefix(_PREFIX)
        ids = [f"{item.prefix}_{suffix}_in{i}" for i, item in enumerate(self.input)]
        return [
            (item_id, [b'{"id":' + msgspec.json.encode(item_id) + b",", item.data])
            for item_id, item in zip(ids, self.input, strict=True)
        ]


class _Kept:
    """The responses of one tenant."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, StoredResponse] = OrderedDict()  # the first is evicted next
        self.num_bytes = 0
        self._counted: dict[str, int] = {}  # key: id; value: bytes in `num_bytes`

    def put(self, response: StoredResponse) -> None:
        """Add a response, or count its bytes again."""
        self.by_id.setdefault(response.id, response)
        self.num_bytes += response.num_bytes - self._counted.get(response.id, 0)
        self._counted[response.id] = response.num_bytes

    def remove(self, response_id: str) -> None:
        """Remove a response; one that is still being made is cancelled."""
        response = self.by_id.pop(response_id)
        self.num_bytes -= self._counted.pop(response_id)
        if response.run is not None:
            response.run.drop()

    def remove_oldest(self) -> None:
        self.remove(next(iter(self.by_id)))


class ResponseStore:
    """Stores responses, each visible only to its tenant.

    When there is no room, the tenant that uses most loses its least recently used response. So a
    tenant keeps its responses while they take no more than an equal share, however much others
    store. Continuing a response counts as a use of it and of all that it continues.

    Args:
        max_responses, max_bytes: limits for all tenants together.
        max_body_bytes: the most stored data that one request may refer to.
    """

    def __init__(self, max_responses: int, max_bytes: int, max_body_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_body_bytes = max_body_bytes
        self._tenants: defaultdict[str | None, _Kept] = defaultdict(_Kept)

    def put(self, tenant: str | None, response: StoredResponse) -> bool:
        """Store a response; return False if it is too large.

        Args:
            response: with an id that was never used before.
        """
        if response.num_bytes > self._max_bytes:
            return False
        self._tenants[tenant].put(response)
        self._make_room()
        return response.id in self._tenants[tenant].by_id

    def count_again(self, tenant: str | None, response: StoredResponse) -> bool:
        """Count the bytes of a response that has grown; return whether it is still stored."""
        kept = self._tenants[tenant]
        if response.id not in kept.by_id:
            return False
        kept.put(response)
        self._make_room()
        return response.id in kept.by_id

    def _make_room(self) -> None:
        tenants = self._tenants.values()
        while sum(kept.num_bytes for kept in tenants) > self._max_bytes:
            max(tenants, key=lambda kept: kept.num_bytes).remove_oldest()
        while sum(len(kept.by_id) for kept in tenants) > self._max_responses:
            max(tenants, key=lambda kept: len(kept.by_id)).remove_oldest()

    def get(self, tenant: str | None, response_id: str) -> StoredResponse:
        """Raises `ApiError` if this tenant has no such response."""
        response = self._tenants[tenant].by_id.get(response_id)
        if response is None:
            raise not_found(f"there is no response {response_id!r}, or it is no longer stored")
        return response

    def delete(self, tenant: str | None, response_id: str) -> None:
        """Raises `ApiError` as `get`."""
        self.get(tenant, response_id)
        self._tenants[tenant].remove(response_id)

    def named(self, tenant: str | None, needs: NeedsStored) -> bytes:
        """Return the responses that a body refers to, as `Stored` parses them.

        Raises:
            ApiError: one is not stored, or together they are too large.
        """
        found = {turn.id: turn for turn in self._turns(tenant, needs.previous_response_id)}
        for item_id in needs.item_ids:
            owner = _PREFIX + item_id.partition("_")[2].rpartition("_")[0]
            response = self._tenants[tenant].by_id.get(owner)
            if response is None:
                raise _missing(
                    f"the item {item_id!r} is not stored", param="input", code="item_not_found"
                )
            _check_ended(response, "input")
            found[owner] = response
        # Earliest first, so that no response is evicted before one that it continues.
        for response_id in reversed(found):
            self._tenants[tenant].by_id.move_to_end(response_id)
        num_bytes = sum(turn.num_bytes for turn in found.values())
        if num_bytes > self._max_body_bytes:
            raise _missing(
                f"the conversation has {num_bytes} bytes, over {self._max_body_bytes}",
                param="previous_response_id",
                code="request_too_large",
            )
        return b"[" + b",".join(map(_turn, found.values())) + b"]"

    def _turns(self, tenant: str | None, response_id: str | None) -> Iterator[StoredResponse]:
        """Yield a response and all that it continues, the latest first."""
        asked = response_id
        while response_id is not None:
            response = self._tenants[tenant].by_id.get(response_id)
            if response is None:
                before = "" if response_id == asked else f", which {asked!r} goes on from,"
                raise _missing(
                    f"the previous response {response_id!r}{before} is not stored",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            _check_ended(response, "previous_response_id")
            yield response
            response_id = response.previous_id


def _check_ended(response: StoredResponse, param: str) -> None:
    if not response.body:
        raise _missing(
            f"the response {response.id!r} is still being made",
            param=param,
            code="response_in_progress",
        )


def _turn(response: StoredResponse) -> bytes:
    items = b",".join(b"".join(pieces) for _, pieces in response.input_items())
    return b'{"input":[' + items + b'],"response":' + b"".join(response.body) + b"}"


def _missing(message: str, *, param: str, code: str) -> ApiError:
    detail = ErrorDetail(message, "invalid_request_error", param, code)
    return ApiError(HTTPStatus.BAD_REQUEST, detail)
