"""The tokens that each stream expects of a step with drafts."""


class ExpectedTokens:
    """Checks that a step's drafts repay every stream for the time that they add.

    Args:
        num_streams: streams of the step, without drafts at first.
        slack: share by which a stream's expected time per token may grow.
    """

    __slots__ = ("_drafted", "_num_streams", "_slack")

    def __init__(self, num_streams: int, slack: float) -> None:
        self._num_streams = num_streams
        self._slack = slack
        self._drafted: dict[int, float] = {}  # key: a stream; value: drafts expected to be right

    def add(self, stream: int, num_right: float) -> None:
        """Add drafts of a stream. Args: num_right: how many are expected to be right."""
        self._drafted[stream] = self._drafted.get(stream, 0.0) + num_right

    def repay(self, factor: float) -> bool:
        """Whether no stream waits longer for its tokens if drafts make the step so much longer."""
        some_have_none = len(self._drafted) < self._num_streams
        fewest = 0.0 if some_have_none else min(self._drafted.values(), default=0.0)
        return factor <= (1.0 + self._slack) * (1.0 + fewest)
