"""What every handler works with."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from legato.core.errors import InvalidRequestError
from legato.engine.client import EngineClient
from legato.observe.metrics import Metrics
from legato.server.config import ServerConfig
from legato.server.errors import unknown_model
from legato.server.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True)
class Context:
    """One engine and what surrounds it."""

    client: EngineClient
    config: ServerConfig
    metrics: Metrics
    lifecycle: Lifecycle

    @property
    def model_name(self) -> str:
        return self.client.info.served_model_name

    def check_model(self, asked: str | None) -> None:
        """Raises `ApiError` where `asked` is another model; a request may leave it out."""
        if asked is not None and asked != self.model_name:
            raise unknown_model(asked, self.model_name)

    def check_completions(self, n: int, num_prompts: int = 1) -> None:
        """Raises `InvalidRequestError` where one request asks for more than the server allows."""
        num_wanted, allowed = n * num_prompts, self.config.max_completions
        if num_wanted > allowed:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={n} are {num_wanted} completions; a request may ask "
                f"for {allowed} (--max-completions)",
                param="prompt" if num_prompts > allowed else "n",
            )


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def _request_id(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id


ContextDep = Annotated[Context, Depends(_context)]
RequestIdDep = Annotated[str, Depends(_request_id)]
