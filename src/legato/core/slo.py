"""Latency promises: named classes of service, and the service that a request asks for."""

from decimal import Decimal

import msgspec

from legato.core.cache_salt import Salt, cache_salt
from legato.core.errors import ConfigError, InvalidRequestError
from legato.core.ranges import LEAST_S, MOST_S
from legato.core.tenant import DEFAULT_TENANT

INTERACTIVE = "interactive"
BATCH = "batch"

MAX_PRIORITY = 100
"""Largest `priority`; the smallest is its negative."""
MAX_CACHE_SALT = 256
"""Characters of `cache_salt`; a key of 32 random bytes has 43 or 64."""
LEAST_QUANTILE, P99, MOST_QUANTILE = 0.5, 0.99, 0.9999
"""Least, usual and largest share of a request's gaps that a promise is for."""


class SloClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Promises to a class of requests; None promises nothing.

    Beside others, a class without any promise is best-effort: a tenth of its tenant's weight.

    Attributes:
        itl_s: each token comes at most this long after the one before it.
        itl_quantile: share of a request's tokens that `itl_s` is promised for.
        tpot_s: the pace: token k comes at most k times this after the first. A stream ahead of its
            pace has slack, which a step may spend (FairBatching, arXiv:2510.14392).
        ttft_s: the first token comes at most this long after the request's arrival.
    """

    itl_s: float | None = None
    itl_quantile: float = P99
    tpot_s: float | None = None
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("itl_s", "tpot_s", "ttft_s"):
            value = getattr(self, name)
            if value is not None and not LEAST_S <= value <= MOST_S:
                raise ConfigError(
                    f"an SLO's {name} must be in [{LEAST_S:g}, {MOST_S:g}] seconds, got {value}"
                )
        if not LEAST_QUANTILE <= self.itl_quantile <= MOST_QUANTILE:
            raise ConfigError(
                f"an SLO's itl_quantile must be in [{LEAST_QUANTILE}, {MOST_QUANTILE}], got "
                f"{self.itl_quantile}"
            )
        if self.itl_s is None and self.itl_quantile != P99:
            raise ConfigError("an SLO's itl_quantile is of its itl_s, which is not set")

    @property
    def is_best_effort(self) -> bool:
        return self.itl_s is None and self.tpot_s is None and self.ttft_s is None

    def __str__(self) -> str:
        itl = "ITL" if self.itl_quantile == P99 else f"{percentile(self.itl_quantile)} ITL"
        promises = ((itl, self.itl_s), ("TPOT", self.tpot_s), ("TTFT", self.ttft_s))
        told = [f"{name} {seconds:g} s" for name, seconds in promises if seconds is not None]
        return ", ".join(told) or "best-effort"

    @property
    def promise_s(self) -> float | None:
        """The longest step that a stream of this class can bear again and again."""
        return min((s for s in (self.itl_s, self.tpot_s) if s is not None), default=None)


def percentile(quantile: float) -> str:
    """Return the usual notation: p99.9 for 0.999."""
    return f"p{(100 * Decimal(str(quantile))).normalize():f}"


class ServiceParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request is served beside others.

    Attributes:
        slo_class: name of its class.
        tenant: name of its tenant.
        priority: among its tenant's requests, lower goes earlier, as in vLLM; in
            [-MAX_PRIORITY, MAX_PRIORITY].
        allow_best_effort: if its TTFT SLO cannot be met, serve it without any promise instead of
            refusing it.
        cache_salt: cached blocks are shared only among requests with the same salt; None counts as
            a salt.
        cache_owner: the tenant whose requests alone share its cached blocks; None for all tenants.
        cache_nonce: random, for a request that shares its cached blocks with no other.
    """

    slo_class: str = INTERACTIVE
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    allow_best_effort: bool = False
    cache_salt: str | None = None
    cache_owner: str | None = None
    cache_nonce: str | None = None

    @property
    def prompt_salt(self) -> Salt | None:
        """Salt of both the owner and the client: the same on each server that has the request."""
        return cache_salt(self.cache_owner, self.cache_salt)

    @property
    def block_salt(self) -> Salt | None:
        """Salt of its cached blocks."""
        return cache_salt(self.cache_owner, self.cache_nonce or self.cache_salt)

    def of_key(self, tenant: str | None, cache_owner: str | None = None) -> "ServiceParams":
        """Return these parameters with the tenant of the API key; None changes nothing.

        Args:
            cache_owner: as of the class.

        Raises:
            InvalidRequestError: the request names another tenant.
        """
        if tenant is None:
            return self
        if self.tenant not in (DEFAULT_TENANT, tenant):
            raise InvalidRequestError(
                f"the API key is of tenant {tenant!r}, the request of {self.tenant!r}",
                param="tenant",
            )
        return msgspec.structs.replace(self, tenant=tenant, cache_owner=cache_owner)
