"""Names of the tenants that share the engine."""

from typing import Annotated

import msgspec

DEFAULT_TENANT = "default"
"""Tenant of requests that name none."""

TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,63}$"

TenantName = Annotated[str, msgspec.Meta(pattern=TENANT_PATTERN)]
