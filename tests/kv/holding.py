"""What requests with blocks may do in any state machine of the KV manager."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from legato.core.request import Request
from legato.kv.manager import KVCacheManager


class HoldingMachine(RuleBasedStateMachine):
    """Lets requests learn tokens and end.

    Attributes:
        kv: set by the subclass.
        held: the requests that have blocks.
    """

    kv: KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Request] = []

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
