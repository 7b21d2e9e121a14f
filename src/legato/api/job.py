"""The prompts of one HTTP request, with their parameters."""

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.answer_format import LegatoNotes
from legato.api.arrival import Arrival
from legato.api.outcome import Generation
from legato.core.kv_transfer import KVTransfer
from legato.core.pooling import PromptPooling
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.step_record import Operation
from legato.core.token_ids import TokenIds


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to complete, `params.n` times each.

    Attributes:
        operation, is_streamed: as in `AnswerRecord`.
        prompts: token ids of each.
        kv_transfer: how the blocks of its only prompt move between engines.
        pooling: how each prompt becomes a vector; None if it is completed.
        field_names: the client's names of fields that errors may blame; see `naming_fields`.
    """

    arrival: Arrival
    operation: Operation
    is_streamed: bool
    prompts: list[TokenIds]
    params: SamplingParams
    service: ServiceParams
    kv_transfer: KVTransfer | None = None
    pooling: PromptPooling | None = None
    field_names: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        asked: Generation,
        prompts: list[TokenIds],
        *,
        arrival: Arrival,
        operation: Operation,
        kv_transfer: KVTransfer | None = None,
        field_names: dict[str, str] | None = None,
    ) -> "Job":
        """Make a job of a parsed body.

        Raises:
            InvalidRequestError: the body names another tenant than the API key.
        """
        return cls(
            arrival=arrival,
            operation=operation,
            is_streamed=asked.is_streamed,
            prompts=prompts,
            params=asked.params,
            service=asked.service.of_key(arrival.tenant, arrival.cache_owner),
            kv_transfer=kv_transfer,
            field_names=field_names or {},
        )

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def notes(self) -> LegatoNotes | UnsetType:
        """The `legato` of the answer, if there are warnings."""
        return LegatoNotes(self.arrival.warnings) if self.arrival.warnings else UNSET
