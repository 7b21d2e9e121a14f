"""What clients and tenants got in a simulated run."""

from statistics import median

import msgspec

from benchmarks.arena.case import Case


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What one source's clients got.

    Attributes:
        num: requests, sent again or not; `num_refused` are the refusals.
        first: first tokens; `in_time` those within the promise, or all without one.
        longest_s, least_s, median_s: waits for a first token, up to now where none has come.
        gaps, late: gaps between tokens, and those beyond the promise.
        promised, kept: requests with a promise and a first token, or a late one, and how many of
            them got what was promised so far.
        still_s: longest time that an admitted request went without advancing.
        tokens: of outputs. `preempted`: preemptions. `ended`: requests with all their tokens.
        retry_least_s, retry_most_s: stated in refusals.
    """

    num: int = 0
    num_refused: int = 0
    first: int = 0
    in_time: int = 0
    longest_s: float = 0.0
    least_s: float = 0.0
    median_s: float = 0.0
    gaps: int = 0
    late: int = 0
    promised: int = 0
    kept: int = 0
    still_s: float = 0.0
    tokens: int = 0
    preempted: int = 0
    ended: int = 0
    retry_least_s: float = 0.0
    retry_most_s: float = 0.0

    @property
    def missed(self) -> int:
        """Requests whose first token was late, or has not come."""
        return self.num - self.num_refused - self.in_time


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Times in refusals, beside how long it took until a request of the same source got in.

    Attributes:
        stated_s, true_s: medians over the refusals; a time is at least one second.
        within: share of the refusals whose stated time is within 3 times the true one, either way.
    """

    num: int
    stated_s: float
    true_s: float
    within: float

    @classmethod
    def of(cls, pairs: list[tuple[float, float, bool]]) -> "Retries":
        """Args: pairs: stated and true seconds; and whether the true time is a lower bound."""
        if not pairs:
            return cls(num=0, stated_s=0.0, true_s=0.0, within=1.0)
        least = [(max(1.0, stated), max(1.0, true), is_open) for stated, true, is_open in pairs]
        right = sum(
            true / 3.0 <= stated and (is_open or stated <= 3.0 * true)
            for stated, true, is_open in least
        )
        return cls(
            num=len(pairs),
            stated_s=median(stated for stated, _, _ in least),
            true_s=median(true for _, true, _ in least),
            within=right / len(pairs),
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a case.

    Attributes:
        first_s, first_who: longest wait for a first token, and its source; up to the end of the
            run if none came, and then `is_open`.
        still_s, still_who: longest time that an admitted request went without advancing.
        denied_s, denied_who: longest time in which a tenant had requests and none advanced.
        shares: service of a tenant in seconds over its share by weight, among the tenants that had
            requests at the same time; key the tenant.
        best_effort: share of the time of steps that best-effort requests took while promised ones
            were there.
        idle: share of the time in which requests waited and no step ran.
        output_per_s, tokens_per_s: tokens a second, of outputs and of all chunks.
        prefill_share: share of best-effort prompts in the prompts' time.
        by_source: key the source's name.
        error: what ended the run early.
    """

    name: str
    seconds: float
    num_steps: int
    first_s: float = 0.0
    first_who: str = ""
    is_open: bool = False
    still_s: float = 0.0
    still_who: str = ""
    denied_s: float = 0.0
    denied_who: str = ""
    shares: dict[str, float] = {}
    best_effort: float = 0.0
    best_effort_prefill: float = 0.0
    gaps: int = 0
    late: int = 0
    promised: int = 0
    kept: int = 0
    refused: int = 0
    preempted: int = 0
    retries: Retries = Retries(num=0, stated_s=0.0, true_s=0.0, within=1.0)
    output_per_s: float = 0.0
    tokens_per_s: float = 0.0
    num_free_blocks: int = 0
    by_source: dict[str, Served] = {}
    error: str = ""

    def quoted(self, case: Case) -> str:
        """Return the case's quote, filled in."""
        text = case.quote.format(run=self, **self.by_source)
        return f"{text}; {self.error}" if self.error else text
