"""Parses bodies, and refuses prompts that are too many or too long."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from legato.api.bodies.body_model import IgnoredFields, ModelRequest, Prompt
from legato.api.bodies.serving import Serving
from legato.api.http.errors import first_problem, unknown_model
from legato.api.http.json_body import parse_json
from legato.core.errors import InvalidRequestError
from legato.engine.client.requests import check_token_ids

_Model = TypeVar("_Model", bound=ModelRequest)


class BodyParser:
    """Parses the bodies of requests to one model, one after the other.

    Args:
        max_token_chars: most characters of a token.

    Attributes:
        serving: the model and the settings.
    """

    def __init__(self, serving: Serving, max_token_chars: int) -> None:
        self.serving = serving
        self._max_chars = serving.info.max_model_len * max_token_chars
        self._ignored: IgnoredFields | None = None  # of the present body

    def begin(self) -> None:
        """Forget the fields that were ignored in the last body."""
        is_lenient = self.serving.unknown_fields == "ignore"
        self._ignored = IgnoredFields() if is_lenient else None

    @property
    def ignored_names(self) -> Collection[str]:
        """Names of the fields that were ignored in the present body."""
        return () if self._ignored is None else self._ignored.names

    def parse(self, model: type[_Model], body: bytes) -> _Model:
        """Return a body as a request.

        Raises:
            ApiError: it asks for another model.
            InvalidRequestError: it is no such request.
        """
        request = validated(model, parse_json(body), self._ignored)
        info = self.serving.info
        if request.model is not None and not info.is_called(request.model):
            raise unknown_model(request.model, info.served_model_names)
        return request

    def check_completions(self, n: int, num_prompts: int = 1) -> None:
        """Raises `InvalidRequestError` if a request asks for more than `--max-completions`."""
        num_wanted, allowed = n * num_prompts, self.serving.max_completions
        if num_wanted > allowed:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={n} are {num_wanted} completions; a request may ask "
                f"for {allowed} (--max-completions)",
                param="prompt" if num_prompts > allowed else "n",
            )

    def check_prompts(self, prompts: Sequence[Prompt], *, is_cut: bool) -> None:
        """Check all prompts before tokenizing the first.

        Args:
            is_cut: whether a text may be longer than the context.

        Raises:
            InvalidRequestError: a text is too long, or a token id does not exist.
        """
        for prompt in prompts:
            if not isinstance(prompt, str):
                check_token_ids(prompt, self.serving.info.vocab_size, "prompt")
            elif not is_cut:
                self.check_fits(len(prompt), "prompt")

    def check_fits(self, num_chars: int, param: str) -> None:
        """Raises `InvalidRequestError` if a text is too long for any tokenization."""
        if num_chars > self._max_chars:
            raise InvalidRequestError(
                f"this model's maximum context length is {self.serving.info.max_model_len} "
                f"tokens, which are at most {self._max_chars} characters, but the prompt has "
                f"{num_chars}",
                param=param,
                code="context_length_exceeded",
            )


def validated(model: type[_Model], data: Any, ignored: IgnoredFields | None = None) -> _Model:
    """Return JSON data as a request.

    Raises:
        InvalidRequestError: the first problem that the model finds.
    """
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise first_problem(problems, known=model.model_fields) from None
