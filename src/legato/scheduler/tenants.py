"""Who shares the engine, and what each has had of it, in seconds of predicted step time.

Each tenant has a counter of the service that it got, divided by its weight, and who has the least
goes first (VTC: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Service is
time, not tokens: a token at the end of a long context costs what it costs.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from legato.core.stats import OTHER_TENANTS, TenantStats

NEWCOMER = ""
"""A tenant that nobody is: it has had what it is owed, and nothing more."""

KEPT_PLACES, KEPT_PACE = 0.25, 0.5
"""Shares of the places and the cache, and of the time of a step, that a tenant's streams leave to
others that may come. Their next request then waits for no stream to end, and its prompt has half of
each step."""

_CREDIT_S = 5.0
"""Most service that a tenant is owed for the time in which nothing of it waited, as a task of
Linux' that has slept: who takes less than its share goes first, and a burst holds up the others for
this long at most."""
_RECENT_S = 60.0
"""After its last request, a tenant is expected to send another for so long."""
_MOST_RECENT = 32
_MOST_SHOWN = 16
_MOST_KNOWN = 1024
"""Tenants beyond these are forgotten once they have no requests."""


class _Shown:
    """What is told of a tenant, or of all those together that are not told of one by one."""

    __slots__ = ("num_refused", "num_running", "num_waiting", "service_s")

    def __init__(self) -> None:
        self.num_running = self.num_waiting = self.num_refused = 0
        self.service_s = 0.0


class Tenant:
    """What one tenant has, and has had.

    Attributes:
        counter_s: seconds of service by its weight, and what it was lifted by.
        num_timely_steps: that computed prompts of its, none of which was late, since the last step
            in which one was.
        last_seen_s: when its last request came.
    """

    __slots__ = (
        "_shown",
        "counter_s",
        "last_seen_s",
        "name",
        "num_running",
        "num_timely_steps",
        "num_waiting",
        "weight",
    )

    def __init__(self, name: str, weight: float, counter_s: float, shown: _Shown) -> None:
        self.name = name
        self.weight = weight
        self.counter_s = counter_s
        self._shown = shown
        self.num_waiting = self.num_running = 0
        self.num_timely_steps = 0
        self.last_seen_s = 0.0

    @property
    def running_by_weight(self) -> float:
        return self.num_running / self.weight

    def count(self, *, waiting: int = 0, running: int = 0) -> None:
        """So many more wait, or run."""
        self.num_waiting += waiting
        self.num_running += running
        self._shown.num_waiting += waiting
        self._shown.num_running += running

    def count_refused(self) -> None:
        self._shown.num_refused += 1

    def charge(self, service_s: float) -> None:
        """Count what it has of a step."""
        self.counter_s += service_s / self.weight
        self._shown.service_s += service_s


class Tenants:
    """Those that have requests, and those that had some lately.

    Args:
        weights: key a tenant's name; all others weigh 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._by_name: OrderedDict[str, Tenant] = OrderedDict()  # the latest seen last
        self._reached_s = 0.0
        self._shown: dict[str, _Shown] = {}  # key a name, or `OTHER_TENANTS`

    def __getitem__(self, name: str) -> Tenant:
        if name == NEWCOMER:
            return Tenant(name, 1.0, self._reached_s, _Shown())
        return self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def stats(self) -> tuple[TenantStats, ...]:
        return tuple(
            TenantStats(
                name=name,
                num_running=shown.num_running,
                num_waiting=shown.num_waiting,
                num_refused=shown.num_refused,
                service_s=shown.service_s,
            )
            for name, shown in self._shown.items()
        )

    def see(self, name: str, now_s: float) -> Tenant:
        """A request of the tenant has come."""
        tenant = self._by_name.get(name)
        if tenant is None:
            # Who is new is owed nothing, or one could be new with every request.
            weight = self._weights.get(name, 1.0)
            tenant = Tenant(name, weight, self._reached_s, self._shown_as(name))
            self._by_name[name] = tenant
            self._forget_one()
        elif not tenant.num_waiting:
            least_s = self._reached_s - _CREDIT_S / tenant.weight
            tenant.counter_s = max(tenant.counter_s, least_s)
        self._by_name.move_to_end(name)
        tenant.last_seen_s = now_s
        return tenant

    def reach(self, counter_s: float) -> None:
        """Nobody is owed more than what it takes to come here, but for its credit.

        It is the counter of who has had least of those that wait. Where nobody does, everybody has
        what it asked for, and it is the greatest counter.
        """
        self._reached_s = max(self._reached_s, counter_s)

    def is_behind(self, tenant: Tenant) -> bool:
        """Whether a tenant has had less than it is owed."""
        return tenant.counter_s < self._reached_s

    def may_come(self, tenant: Tenant, now_s: float) -> bool:
        """Whether another may soon send a request for which a tenant should leave room.

        The other has had no more and has less running. A tenant leaves no room as long as it does
        not have at least one request more running than its share of all that run.
        """
        if tenant.num_running <= 1:
            return False
        recent = [*self._recent(now_s)]
        whole = max(tenant.weight, sum([other.weight for other in recent]))
        share = sum([other.num_running for other in recent]) * tenant.weight / whole
        running, counter_s = tenant.running_by_weight, tenant.counter_s
        return tenant.num_running >= 1.0 + share and any(
            other.num_waiting == 0
            and other.counter_s <= counter_s
            and other.running_by_weight < running
            for other in recent
        )

    def _recent(self, now_s: float) -> Iterable[Tenant]:
        for tenant, _ in zip(reversed(self._by_name.values()), range(_MOST_RECENT), strict=False):
            if now_s - tenant.last_seen_s > _RECENT_S:
                return
            yield tenant

    def _shown_as(self, name: str) -> _Shown:
        if name not in self._shown and len(self._shown) >= _MOST_SHOWN:
            name = OTHER_TENANTS
        return self._shown.setdefault(name, _Shown())

    def _forget_one(self) -> None:
        """The least recently seen, where there are too many; each that comes forgets one."""
        if len(self._by_name) <= _MOST_KNOWN:
            return
        name, tenant = next(iter(self._by_name.items()))
        if tenant.num_waiting or tenant.num_running:
            self._by_name.move_to_end(name)
        else:
            del self._by_name[name]
