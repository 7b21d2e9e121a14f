"""Tenants and their service, in seconds of predicted step time.

Each tenant has a counter of its service, divided by its weight, and the tenant with the least goes
first (VTC: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Service is time,
not tokens: a token at the end of a long context costs more.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from legato.core.stats import OTHER_TENANTS, TenantStats

NEWCOMER = ""
"""Name of a tenant without requests, which has had exactly the service that it is owed."""

KEPT_PLACES, KEPT_PACE = 0.25, 0.5
"""Shares that a tenant's streams leave to other tenants that may come: of places and cache, and of
a step's time. Their next request then waits for no stream to end, and its prompt has half of each
step."""

_CREDIT_S = 5.0
"""Most service that a tenant is owed for time in which no request of it waited, like a Linux task
that slept: a tenant that uses less than its share goes first, and its burst delays other tenants
for this long at most."""
_RECENT_S = 60.0
"""Time after its last request in which a tenant is expected to send another."""
_MOST_RECENT = 32
_MOST_SHOWN = 16
_MOST_KNOWN = 1024
"""Tenants beyond these are forgotten once they have no requests."""


def places_left(most_running: int, kept: float) -> int:
    """Return how many requests may run if a share `kept` of all places stays free, at least one."""
    return max(1, int((1.0 - kept) * most_running))


class _Shown:
    """Reported counts of one tenant, or of all tenants that are not reported one by one."""

    __slots__ = ("num_refused", "num_running", "num_waiting", "service_s")

    def __init__(self) -> None:
        self.num_running = self.num_waiting = self.num_refused = 0
        self.service_s = 0.0


class Tenant:
    """One tenant's requests and service.

    Attributes:
        counter_s: seconds of service divided by the weight, plus the lifts by `Tenants.see`.
        num_timely_steps: steps with prompts of the tenant since the last one with a late prompt.
        last_seen_s: time of its last request.
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
        """Change the numbers of waiting and running requests."""
        self.num_waiting += waiting
        self.num_running += running
        self._shown.num_waiting += waiting
        self._shown.num_running += running

    def count_refused(self) -> None:
        self._shown.num_refused += 1

    def charge(self, service_s: float) -> None:
        """Add the tenant's service in a step."""
        self.counter_s += service_s / self.weight
        self._shown.service_s += service_s


class Tenants:
    """The tenants that have requests, or had some lately.

    Args:
        weights: key a tenant's name; all other tenants weigh 1.
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

    def on_request(self, name: str, now_s: float) -> Tenant:
        """Record a new request of a tenant; return the tenant."""
        tenant = self._by_name.get(name)
        if tenant is None:
            # A new tenant is owed nothing, or a client would take a new name for every request.
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

    def raise_floor(self, counter_s: float) -> None:
        """Raise the counter up to which tenants are owed service, apart from their credit.

        It is the least counter of the waiting tenants. If no tenant waits, every tenant has what it
        asked for, and it is the greatest counter.
        """
        self._reached_s = max(self._reached_s, counter_s)

    def is_owed(self, tenant: Tenant) -> bool:
        """Whether a tenant has had less than it is owed."""
        return tenant.counter_s < self._reached_s

    def may_come(self, tenant: Tenant, now_s: float, most_running: int) -> bool:
        """Whether a tenant should leave room for a request that another may soon send.

        The other has had no more and has less running. A tenant that has at most one request more
        running than its share of all leaves no room, as long as there are places enough.

        Args:
            most_running: requests that may run at once.
        """
        most = places_left(most_running, KEPT_PLACES)
        if tenant.num_running < min(2, most):
            return False
        recent = [*self._recent(now_s)]
        whole = max(tenant.weight, sum([other.weight for other in recent]))
        share = sum([other.num_running for other in recent]) * tenant.weight / whole
        running, counter_s = tenant.running_by_weight, tenant.counter_s
        return tenant.num_running >= min(1.0 + share, most) and any(
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
        """Forget the least recently seen tenant if there are too many; each new one calls this."""
        if len(self._by_name) <= _MOST_KNOWN:
            return
        name, tenant = next(iter(self._by_name.items()))
        if tenant.num_waiting or tenant.num_running:
            self._by_name.move_to_end(name)
        else:
            del self._by_name[name]
