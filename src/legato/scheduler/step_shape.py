"""The shape of a step: the counts that its duration depends on."""

from collections.abc import Sequence
from itertools import pairwise

from legato.core.plan import RowCut, ScheduledChunk, StepPlan
from legato.core.step_record import ChunkRecord


class StepShape:
    """Counts over the chunks of one step, filled in as the step is put together.

    The attention of a chunk of n tokens starting at s covers n rows of s + (n + 1) / 2 keys on
    average. A stream with drafts counts as a decode plus the rows of its drafts, which read the
    same keys.

    Attributes:
        decode_context: keys read by the decode rows, summed.
        num_draft_rows, draft_context: rows of drafts, and keys read by them, summed.
        prefill_area: query-key pairs of the prefill chunks.
        prefill_context: keys read by the prefill chunks, summed over chunks: each is read once for
            all rows of its chunk.
        num_samples: rows whose logits are computed.
    """

    __slots__ = (
        "decode_context",
        "draft_context",
        "num_decode_rows",
        "num_draft_rows",
        "num_prefill_chunks",
        "num_prefill_tokens",
        "num_samples",
        "prefill_area",
        "prefill_context",
    )

    def __init__(self) -> None:
        self.num_decode_rows = 0
        self.decode_context = 0.0
        self.num_draft_rows = 0
        self.draft_context = 0.0
        self.num_prefill_chunks = 0
        self.num_prefill_tokens = 0
        self.prefill_area = 0.0
        self.prefill_context = 0
        self.num_samples = 0

    @classmethod
    def of(cls, plan: StepPlan) -> "StepShape":
        """Return the shape of a finished plan."""
        return cls.of_chunks(plan.chunks)

    @classmethod
    def of_chunks(cls, chunks: Sequence[ScheduledChunk | ChunkRecord]) -> "StepShape":
        """Return the shape of a step with these chunks."""
        shape = cls()
        shape.add_decodes([chunk.start + 1 for chunk in chunks if chunk.kind == "decode"])
        for chunk in chunks:
            if chunk.kind != "decode" and chunk.num_tokens:  # it may have lost all its rows
                shape.add(chunk)
        return shape

    @classmethod
    def computed(cls, plan: StepPlan, cuts: Sequence[RowCut]) -> "StepShape":
        """Return the mean shape over the layers of a step that dropped rows: the work it did."""
        ends = [*(cut.done for cut in cuts), 1.0]
        shares = [end - begin for begin, end in pairwise((0.0, *ends))]
        counts = (plan.num_tokens, *(cut.num_rows for cut in cuts))
        shapes = [cls.of(plan.first_rows(count)) for count in counts]
        mean = cls()
        for name in cls.__slots__:
            values = [getattr(shape, name) for shape in shapes]
            value = sum(share * value for share, value in zip(shares, values, strict=True))
            setattr(mean, name, round(value) if isinstance(values[0], int) else value)
        mean.num_samples = shapes[-1].num_samples
        return mean

    def add_prefill(self, start: int, num_tokens: int, *, samples: int) -> None:
        """Add a prefill chunk. Args: samples: rows whose logits are computed."""
        self.num_prefill_chunks += 1
        self.num_prefill_tokens += num_tokens
        self.prefill_area += chunk_area(start, num_tokens)
        self.prefill_context += start + num_tokens
        self.num_samples += samples

    def copy(self) -> "StepShape":
        """Return an independent copy."""
        shape = StepShape()
        for name in StepShape.__slots__:
            setattr(shape, name, getattr(self, name))
        return shape

    def without_drafts(self) -> "StepShape":
        """Return the shape of the step without its drafts."""
        shape = self.copy()
        shape.num_samples -= shape.num_draft_rows
        shape.num_draft_rows, shape.draft_context = 0, 0.0
        return shape

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_draft_rows + self.num_prefill_tokens

    def add(self, chunk: ScheduledChunk | ChunkRecord) -> None:
        if chunk.kind == "decode":
            self.add_decode(chunk.start + 1)
        elif chunk.kind == "verify":
            self.add_decode(chunk.start + 1)
            self.add_drafts(chunk.start + 1, chunk.num_tokens - 1)
        else:
            self.add_prefill(chunk.start, chunk.num_tokens, samples=chunk.num_samples)

    def add_decode(self, context: float) -> None:
        """Add a decode. Args: context: keys that the row reads, its own included."""
        self.num_decode_rows += 1
        self.decode_context += context
        self.num_samples += 1

    def add_decodes(self, contexts: Sequence[float]) -> None:
        """Add a decode for each context."""
        self.num_decode_rows += len(contexts)
        self.decode_context += sum(contexts)
        self.num_samples += len(contexts)

    def add_drafts(self, context: float, count: int) -> None:
        """Add drafts to a decode.

        Args:
            context: keys that the decode reads; its drafts read one more each.
        """
        self.num_draft_rows += count
        self.draft_context += count * (context + 0.5 * (count + 1))
        self.num_samples += count

    def without_prefill(self) -> "StepShape":
        """Return the shape of the streams' tokens alone."""
        shape = self.copy()
        shape.num_samples = shape.num_decode_rows + shape.num_draft_rows
        shape.num_prefill_chunks = shape.num_prefill_tokens = shape.prefill_context = 0
        shape.prefill_area = 0.0
        return shape

    def remove_decode(self, context: float) -> None:
        """Undo `add_decode`."""
        self.num_decode_rows -= 1
        self.decode_context -= context
        self.num_samples -= 1


def chunk_area(start: int, num_tokens: int) -> float:
    """Return the query-key pairs of tokens [start, start + num_tokens), which attend causally."""
    return num_tokens * (start + 0.5 * (num_tokens + 1))
