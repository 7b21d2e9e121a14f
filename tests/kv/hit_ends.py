"""What requests may do where hits end at certain blocks alone: at states, or after windows."""

from collections.abc import Sized

from hypothesis.stateful import invariant

from legato.core.request import Request
from tests.kv.cache_watcher import Routers
from tests.kv.holding import HoldingMachine
from tests.kv.requests import request_for


class HitEndsMachine(HoldingMachine):
    """Lets requests come and be served, and two routers follow where hits end.

    Attributes:
        flights: set by the subclass; the steps in flight.
        served: prompts of requests that were computed and ended.
    """

    flights: Sized

    def __init__(self) -> None:
        super().__init__()
        self.served: list[list[int]] = []
        self.routers = Routers()

    def plan_chunk(self, request: Request, num_tokens: int) -> None:
        """Plan a step with up to `num_tokens` of the request."""
        raise NotImplementedError

    def land(self) -> None:
        """Land the oldest step in flight."""
        raise NotImplementedError

    def check_ends(self) -> None:
        """Check that Legato's router knows where hits end."""
        raise NotImplementedError

    def add(self, prompt: list[int], salt: str | None = None) -> None:
        """A request comes, and has blocks if there are enough."""
        self.num_added += 1
        request = request_for(str(self.num_added), prompt, cache_salt=salt)
        found, fits = self.kv.lookup.match(request), self.kv.fits(request)
        assert found.num_computed_tokens == found.num_tokens < request.num_tokens
        assert self.kv.reserve(request, found) is fits
        if fits:
            self.held.append(request)
            request.catch_up(self.kv.num_computed_tokens(request))
            assert request.num_computed_tokens == found.num_tokens

    def serve_in_chunks(self, prompt: list[int], num_tokens: int) -> None:
        """A request comes, is computed and ends."""
        num_held = len(self.held)
        self.add(prompt)
        if len(self.held) > num_held:
            request = self.held[-1]
            while request.num_scheduled_tokens < request.num_tokens:
                self.plan_chunk(request, num_tokens)
                self.land()
            self.drop(request)
            self.served.append(prompt)

    @invariant()
    def blocks_come_free_when_all_steps_have_landed(self) -> None:
        if not self.flights:
            assert len([*self.kv._tables]) == len(self.held)

    @invariant()
    def routers_know_where_hits_end(self) -> None:
        self.routers.take(self.kv.take_events())
        if self.routers.own.is_watching:
            self.routers.check(self.kv)
            self.check_ends()
