"""Service of tenants in a run: seconds of steps, divided by what each chunk costs."""

from collections import Counter, defaultdict

from legato.core.step_record import StepRecord
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import chunk_area


class Service:
    """Divides the time of steps among tenants, and compares it with their shares by weight.

    Attributes:
        denied_s, denied_who: as in `Outcome`.
    """

    def __init__(self, costs: StepCosts, weights: dict[str, float]) -> None:
        self._costs = costs
        self._weights = weights
        self._present = Counter[str]()  # open requests of a tenant
        self._present_best_effort = 0
        self._served_s: defaultdict[str, float] = defaultdict(float)
        self._owed_s: defaultdict[str, float] = defaultdict(float)
        self._last_s: dict[str, float] = {}  # when a present tenant was served last, or came
        self._together_s = self._best_effort_s = 0.0
        self._prefill_s, self._best_effort_prefill_s = 0.0, 0.0
        self.denied_s, self.denied_who = 0.0, ""

    def come(self, tenant: str, now_s: float, *, best_effort: bool) -> None:
        """Count a request that has been sent."""
        self._present_best_effort += best_effort
        self._present[tenant] += 1
        if self._present[tenant] == 1:
            self._last_s[tenant] = now_s

    def go(self, tenant: str, now_s: float, *, best_effort: bool) -> None:
        """Count a request that has ended."""
        self._present_best_effort -= best_effort
        self._present[tenant] -= 1
        if not self._present[tenant]:
            self._deny(tenant, now_s)
            del self._present[tenant], self._last_s[tenant]

    def add(self, step: StepRecord, tenant_of: dict[str, tuple[str, bool]]) -> None:
        """Divide a step. Args: tenant_of: key a request, value its tenant and if best-effort."""
        costs = self._costs
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        row_s = costs.rows_s(num_tokens) / max(1, num_tokens) + costs.step_s / max(1, num_tokens)
        decode_s = row_s + costs.decode_row_s + costs.sample_s
        each: defaultdict[str, float] = defaultdict(float)
        whole_s = best_effort_s = 0.0
        for chunk in step.chunks:
            if chunk.kind != "prefill":
                cost_s = decode_s + costs.decode_context_s * (chunk.start + 1)
            else:
                cost_s = costs.chunk_s + chunk.num_tokens * row_s
                cost_s += costs.area_s * chunk_area(chunk.start, chunk.num_tokens)
                cost_s += costs.context_s * (chunk.start + chunk.num_tokens)
            tenant, is_best_effort = tenant_of[chunk.request_id]
            each[tenant] += cost_s
            whole_s += cost_s
            best_effort_s += cost_s * is_best_effort
            if chunk.kind == "prefill" and self._is_mixed:
                self._prefill_s += cost_s
                self._best_effort_prefill_s += cost_s * is_best_effort
        scale = step.seconds / whole_s if whole_s else 0.0
        if self._is_mixed:
            self._together_s += step.seconds
            self._best_effort_s += scale * best_effort_s
        weights = {tenant: self._weights.get(tenant, 1.0) for tenant in self._present}
        total = sum(weights.values())
        for tenant, weight in weights.items():
            self._owed_s[tenant] += step.seconds * weight / total
        for tenant, cost_s in each.items():
            self._served_s[tenant] += scale * cost_s
            self._deny(tenant, step.ended_s)

    def end(self, now_s: float) -> None:
        """Count what tenants still wait for."""
        for tenant in [*self._last_s]:
            self._deny(tenant, now_s)

    @property
    def shares(self) -> dict[str, float]:
        """As in `Outcome`."""
        return {t: self._served_s[t] / owed_s for t, owed_s in self._owed_s.items() if owed_s}

    @property
    def best_effort(self) -> float:
        return self._best_effort_s / self._together_s if self._together_s else 0.0

    @property
    def best_effort_prefill(self) -> float:
        return self._best_effort_prefill_s / self._prefill_s if self._prefill_s else 0.0

    @property
    def _is_mixed(self) -> bool:
        return 0 < self._present_best_effort < self._present.total()

    def _deny(self, tenant: str, now_s: float) -> None:
        denied_s = now_s - self._last_s.get(tenant, now_s)
        if denied_s > self.denied_s:
            self.denied_s, self.denied_who = denied_s, tenant
        if tenant in self._last_s:
            self._last_s[tenant] = now_s
