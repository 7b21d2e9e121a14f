"""Names of tenants: those between whom the engine is shared."""

from typing import Annotated

import msgspec

DEFAULT_TENANT = "default"
"""Whose requests are that name no tenant."""

TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,63}$"

TenantName = Annotated[str, msgspec.Meta(pattern=TENANT_PATTERN)]
