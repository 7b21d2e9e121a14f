"""Changes a row's logits as its request asks, before the temperature is applied."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from legato.executor.sequence import SamplingRow

Upload = Callable[[npt.NDArray[np.generic]], torch.Tensor]
"""Copies an array to the logits' device, without waiting for the device."""

_Places = tuple[torch.Tensor, torch.Tensor]
"""Indices (row, token id) of N logits: two int64 [N]."""

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_IS_ALLOWED = np.unpackbits(_BYTES, axis=1, bitorder="little") == 1
_CEILINGS = np.where(_IS_ALLOWED, np.float32("inf"), np.float32("-inf"))
"""float32 [256, 8]: upper bounds of eight tokens' logits, one row for each byte of a mask."""


def asks_for_change(row: SamplingRow) -> bool:
    """Whether `LogitAdjuster.adjust` changes any logit of the row."""
    return (
        bool(row.params.logit_bias)
        or row.limits is not None
        or row.mask is not None
        or _is_too_short(row)
        or row.params.repetition_penalty != 1.0
        or _is_output_penalized(row)
    )


def _is_too_short(row: SamplingRow) -> bool:
    return row.num_output_tokens < row.params.min_tokens


def _is_output_penalized(row: SamplingRow) -> bool:
    return row.params.frequency_penalty != 0.0 or row.params.presence_penalty != 0.0


class LogitAdjuster:
    """Changes logits on one device, with what the host knows of their rows.

    Args:
        upload: how arrays come to the device; the default is for logits on the host.
    """

    def __init__(self, upload: Upload = torch.from_numpy) -> None:
        self._upload = upload
        self._ceilings = upload(_CEILINGS)

    def adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Add biases, forbid tokens and penalize repetition, in this order.

        No later step allows a token again that an earlier one has forbidden.

        Args:
            logits: float32 [S, V]; changed in place.
            rows: S rows.
        """
        self._add_bias(logits, rows)
        self._forbid_early_ends(logits, rows)
        self._forbid_others(logits, rows)
        self._forbid_bad_words(logits, rows)
        self._forbid_by_grammar(logits, rows)
        self._penalize_repetition(logits, rows)
        self._penalize_output(logits, rows)

    def _add_bias(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        biases = {i: row.params.logit_bias for i, row in enumerate(rows) if row.params.logit_bias}
        if not biases:
            return
        places = self._places({i: np.array(list(bias)) for i, bias in biases.items()})
        logits[places] += self._float32(value for b in biases.values() for value in b.values())

    def _forbid_early_ends(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        vocab_size = logits.shape[1]
        ends = {
            i: [t for t in (*row.eos_token_ids, *row.params.stop_token_ids) if t < vocab_size]
            for i, row in enumerate(rows)
            if _is_too_short(row)
        }
        if not ends:
            return
        tokens = {i: np.array(ids, dtype=np.int64) for i, ids in ends.items()}
        logits[self._places(tokens)] = float("-inf")

    def _forbid_others(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Forbid all tokens but `allowed_token_ids`, in the rows that have such a list."""
        allowed = {
            i: row.limits.allowed
            for i, row in enumerate(rows)
            if row.limits is not None and row.limits.allowed is not None
        }
        if not allowed:
            return
        places = self._places(allowed)
        values = logits[places]
        logits[self._upload(np.array(list(allowed)))] = float("-inf")
        logits[places] = values

    def _forbid_bad_words(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Forbid each token that would complete a bad word."""
        forbidden = {
            i: row.limits.forbidden(row.output_token_ids)
            for i, row in enumerate(rows)
            if row.limits is not None
        }
        if forbidden:
            logits[self._places(forbidden)] = float("-inf")

    def _forbid_by_grammar(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Forbid the tokens that the grammar's mask excludes, and ids after the mask's end."""
        masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
        if not masks:
            return
        bits = self._upload(np.stack(list(masks.values())).view(np.uint8))
        # A look-up and a minimum take a tenth of masked_fill's time on a CPU.
        looked_up = self._ceilings.index_select(0, bits.flatten().int())
        ceilings = looked_up.reshape(len(masks), -1)[:, : logits.shape[1]]
        num_tokens = ceilings.shape[1]
        for i, ceiling in zip(masks, ceilings, strict=True):
            known = logits[i, :num_tokens]
            torch.minimum(known, ceiling, out=known)
            logits[i, num_tokens:] = float("-inf")

    def _penalize_repetition(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Divide or multiply the logits of tokens that the row already has.

        A token that occurs twice is written twice, with the same value.
        """
        seen = {
            i: np.concatenate((row.prompt_token_ids, row.output_token_ids))
            for i, row in enumerate(rows)
            if row.params.repetition_penalty != 1.0
        }
        if not seen:
            return
        places = self._places(seen)
        penalty = self._float32(row.params.repetition_penalty for row in rows)[places[0]]
        values = logits[places]
        logits[places] = torch.where(values > 0, values / penalty, values * penalty)

    def _penalize_output(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        penalized = [i for i, row in enumerate(rows) if _is_output_penalized(row)]
        if not penalized:
            return
        outputs = [rows[i].output_token_ids for i in penalized]
        tokens, counts = zip(*(np.unique(ids, return_counts=True) for ids in outputs), strict=True)
        places = self._places(dict(zip(penalized, tokens, strict=True)))
        occurrences = self._upload(np.concatenate(counts))
        frequency = self._float32(row.params.frequency_penalty for row in rows)[places[0]]
        presence = self._float32(row.params.presence_penalty for row in rows)[places[0]]
        logits[places] -= frequency * occurrences + presence

    def _places(self, by_row: dict[int, npt.NDArray[np.int64]]) -> _Places:
        """Return the indices of the given token ids; key row, value int64 [any number]."""
        rows = np.repeat(list(by_row), [len(ids) for ids in by_row.values()])
        tokens = np.concatenate(list(by_row.values()))
        return self._upload(rows), self._upload(tokens)

    def _float32(self, values: Iterable[float]) -> torch.Tensor:
        """Return float32 [any number]."""
        return self._upload(np.array(list(values), dtype=np.float32))
