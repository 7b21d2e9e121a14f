"""What requests with blocks may do in any state machine of the KV manager."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from legato.core.request import Request
from legato.kv.manager import KVCacheManager
from tests.kv.conservation import check_blocks
from tests.kv.requests import request_for


class HoldingMachine(RuleBasedStateMachine):
    """Lets requests learn tokens and end, and the cache be forgotten and watched.

    Attributes:
        kv: set by the subclass.
        held: the requests that have blocks.
        num_added: the requests that have come, for their ids.
        looked_up: requests whose way into the tree is remembered.
    """

    kv: KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Request] = []
        self.num_added = 0
        self.looked_up: list[Request] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def decode(self, data: st.DataObject, token_id: int) -> None:
        request = data.draw(st.sampled_from(self.held))
        if request.num_computed_tokens == request.num_tokens:
            request.append(token_id, 0.0)
            if not self.kv.reserve(request):
                self.drop(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.held)))

    def drop(self, request: Request) -> None:
        self.held.remove(request)
        self.kv.release(request)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=6, max_size=16))
    def look_up(self, prompt: list[int]) -> None:
        self.looked_up = [request_for("?", prompt), *self.looked_up[:3]]
        self.kv.lookup.match(self.looked_up[0])

    @precondition(lambda self: self.looked_up or self.held)
    @rule(data=st.data())
    def look_up_again(self, data: st.DataObject) -> None:
        """What is remembered is what is found."""
        request = data.draw(st.sampled_from(self.looked_up + self.held))
        lookup = self.kv.lookup
        way = self.kv._tree.match(lookup.sought(request), lookup.num_shareable(request))
        assert lookup.match(request) == lookup.cut(way)

    @rule()
    def forget(self) -> None:
        self.kv.forget()
        assert self.kv.num_cached_blocks == 0

    @rule()
    def watch(self) -> None:
        self.kv.watch()

    @invariant()
    def blocks_are_conserved(self) -> None:
        check_blocks(self.kv)
