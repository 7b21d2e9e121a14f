"""Tenants and their service, in seconds of predicted step time.

Each tenant has a counter of its service, divided by its weight, and the tenant with the least goes
first (VTC: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Service is time,
not tokens: a token at the end of a long context costs more. A tenant's best-effort requests count
as a tenant of their own, of a tenth of its weight.
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

BEST_EFFORT = 0.1
"""Weight of a tenant's best-effort requests, as a share of its own."""

_CREDIT_S = 5.0
"""Most service that a tenant is owed for time in which no request of it waited, like a Linux task
that slept: a tenant that uses less than its share goes first, and its burst delays other tenants
for this long at most. Best-effort requests are owed none: they use what others leave."""
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
    """One tenant's requests with a promise, or its best-effort ones, and their service.

    Attributes:
        counter_s: seconds of service divided by the weight, plus the lifts by `Tenants.on_request`.
        late_owed_s: prefill that its late prompts are owed, in seconds; negative if they are ahead.
        last_seen_s: time of its last request.
    """

    __slots__ = (
        "_shown",
        "counter_s",
        "is_best_effort",
        "last_seen_s",
        "late_owed_s",
        "name",
        "num_running",
        "num_waiting",
        "weight",
    )

    def __init__(
        self,
        name: str,
        weight: float,
        counter_s: float,
        shown: _Shown,
        *,
        is_best_effort: bool = False,
    ) -> None:
        self.name = name
        self.is_best_effort = is_best_effort
        self.weight = weight * (BEST_EFFORT if is_best_effort else 1.0)
        self.counter_s = counter_s
        self._shown = shown
        self.num_waiting = self.num_running = 0
        self.late_owed_s = 0.0
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
        # Key a name and whether it is of the best-effort requests; the latest seen last.
        self._known: OrderedDict[tuple[str, bool], Tenant] = OrderedDict()
        self._reached_s = 0.0
        self._shown: dict[str, _Shown] = {}  # key a name, or `OTHER_TENANTS`

    def of(self, name: str, *, best_effort: bool = False) -> Tenant:
        """Return a tenant, which is known from its first request on."""
        tenant = self._known.get((name, best_effort))
        if tenant is None and name == NEWCOMER:
            return self._new(name, _Shown(), best_effort=best_effort)
        return tenant or self._remember(name, best_effort=best_effort)

    def _remember(self, name: str, *, best_effort: bool) -> Tenant:
        # A new tenant is owed nothing, or a client would take a new name for every request.
        tenant = self._new(name, self._shown_as(name), best_effort=best_effort)
        self._known[name, best_effort] = tenant
        self._forget_one()
        return tenant

    def __len__(self) -> int:
        return len(self._known)

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

    def on_request(self, name: str, now_s: float, *, best_effort: bool = False) -> Tenant:
        """Record a new request of a tenant; return the tenant."""
        known = self._known.get((name, best_effort))
        tenant = known or self._remember(name, best_effort=best_effort)
        if not tenant.num_waiting:
            self.lift(tenant)
        self._known.move_to_end((name, best_effort))
        tenant.last_seen_s = now_s
        return tenant

    def lift(self, tenant: Tenant) -> None:
        """Let a tenant be owed no more than its credit for the time in which none waited."""
        credit_s = 0.0 if tenant.is_best_effort else _CREDIT_S / tenant.weight
        tenant.counter_s = max(tenant.counter_s, self._reached_s - credit_s)

    def raise_floor(self, counter_s: float) -> None:
        """Raise the counter up to which tenants are owed service, apart from their credit.

        It is the least counter of the waiting tenants. If no tenant waits, every tenant has what it
        asked for, and it is the greatest counter.
        """
        self._reached_s = max(self._reached_s, counter_s)

    def is_owed(self, tenant: Tenant) -> bool:
        """Whether a tenant has had less than it is owed."""
        return tenant.counter_s < self._reached_s

    def may_come(
        self, tenant: Tenant, now_s: float, most_running: int, *, num_more: int = 0
    ) -> bool:
        """Whether a tenant should leave room for a request that another may soon send.

        The other has had no more and has less running. A tenant that has at most one request more
        running than its share of all leaves no room, as long as there are places enough.

        Args:
            most_running: requests that may run at once.
            num_more: further requests of the tenant, as if they ran.
        """
        most = places_left(most_running, KEPT_PLACES)
        num_running = tenant.num_running + num_more
        if num_running < min(2, most):
            return False
        recent = [*self._recent(now_s)]
        whole = max(tenant.weight, sum([other.weight for other in recent]))
        num_all = sum([other.num_running for other in recent]) + num_more
        share = num_all * tenant.weight / whole
        running, counter_s = num_running / tenant.weight, tenant.counter_s
        return num_running >= min(1.0 + share, most) and any(
            other.num_waiting == 0
            and other.counter_s <= counter_s
            and other.running_by_weight < running
            for other in recent
        )

    def _recent(self, now_s: float) -> Iterable[Tenant]:
        """Yield the tenants that may send another request with a promise."""
        for tenant, _ in zip(reversed(self._known.values()), range(_MOST_RECENT), strict=False):
            if now_s - tenant.last_seen_s > _RECENT_S:
                return
            if not tenant.is_best_effort:
                yield tenant

    def _new(self, name: str, shown: _Shown, *, best_effort: bool) -> Tenant:
        weight = self._weights.get(name, 1.0)
        return Tenant(name, weight, self._reached_s, shown, is_best_effort=best_effort)

    def _shown_as(self, name: str) -> _Shown:
        if name not in self._shown and len(self._shown) >= _MOST_SHOWN:
            name = OTHER_TENANTS
        return self._shown.setdefault(name, _Shown())

    def _forget_one(self) -> None:
        """Forget the least recently seen tenant if there are too many; each new one calls this."""
        if len(self._known) <= _MOST_KNOWN:
            return
        key, tenant = next(iter(self._known.items()))
        if tenant.num_waiting or tenant.num_running:
            self._known.move_to_end(key)
        else:
            del self._known[key]
