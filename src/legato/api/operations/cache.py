"""POST /reset_prefix_cache, as in vLLM."""

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.context import ContextDep
from legato.api.http.access import ADMINS_ONLY
from legato.api.http.bodies import json_response
from legato.api.openapi import responses
from legato.core.errors import InvalidRequestError

router = APIRouter(tags=["cache"])


class CacheReset(msgspec.Struct, frozen=True):
    """Attributes: `success`: whether all of the cache is forgotten; false while requests run."""

    success: bool


@router.post("/reset_prefix_cache", responses=responses(CacheReset), dependencies=[ADMINS_ONLY])
async def reset_prefix_cache(
    context: ContextDep, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Forget cached blocks that no request uses. For admins only."""
    if reset_running_requests:
        raise InvalidRequestError(
            "running requests keep their blocks", param="reset_running_requests"
        )
    del reset_external  # what is in host memory is forgotten anyway
    context.engine.forget_cache()
    return json_response(CacheReset(success=not context.engine.num_unfinished))
