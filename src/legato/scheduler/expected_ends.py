"""When running requests are expected to end, by the outputs of ended ones, and what they need."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from legato.core.request import Request
from legato.scheduler.step_shape import StepShape

_WINDOW = 512
"""Ended requests that are remembered, of each tenant's class and of all together."""

_ENOUGH = 8
"""Ended requests of a tenant's class from which its own lengths count."""

_MOST_KNOWN = 256
"""Classes of tenants beyond these are forgotten, the least recently ended first."""

_PRIOR = 256
"""Expected output tokens before any request has ended: about a chat's mean."""

_MEDIAN = 0.5
_ROUNDING = 1e-9

_MOST_MOMENTS = 4
"""Moments to come at which a step of the streams is predicted."""

Counts = npt.NDArray[np.int64]


class _Lengths:
    """Lengths of recent outputs, and their survival curve.

    The curve counts running outputs up to where they are (Kaplan and Meier, 1958): the first
    outputs to end after a start are the short ones.
    """

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._recent = deque(first, maxlen=_WINDOW)
        self.is_outdated = True
        self._ends: list[int] = []  # lengths at which outputs ended, ascending
        self._ended: list[float] = []  # share of all outputs that has ended at each of these
        self._longest = 0

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self.is_outdated = True

    def update(self, running: Iterable[int]) -> None:
        """Draw the curve again.

        Args:
            running: present lengths of the outputs that have not ended.
        """
        ends, counts = np.unique(self._recent, return_counts=True)
        censored = np.sort(np.fromiter(running, np.int64))
        num_as_long = counts[::-1].cumsum()[::-1] + len(censored) - censored.searchsorted(ends)
        self._ends = ends.tolist()
        self._ended = (1.0 - np.cumprod(1.0 - counts / num_as_long)).tolist()
        self._longest = int(censored[-1]) if len(censored) else 0
        self.is_outdated = False

    def left(self, num_generated: int, optimism: float) -> int:
        """Return how many tokens an output still generates: the quantile of the longer ones.

        An output longer than all that are known is expected to last as long again (Lindy's law).
        """
        first_longer = bisect_right(self._ends, num_generated)
        if optimism == 1.0 and first_longer < len(self._ends):
            return 0
        ended = self._ended[first_longer - 1] if first_longer else 0.0
        within = ended + (1.0 - optimism) * (1.0 - ended)
        end = bisect_left(self._ended, within - _ROUNDING, first_longer)
        if end < len(self._ends):
            return self._ends[end] - num_generated
        return 2 * max(self._longest, num_generated) - num_generated


class OutputLengths:
    """Forecasts an output's length as a quantile of recent ones of its tenant and class.

    Args:
        optimism: in [0, 1]. At 0 every request is expected to generate all that it may. Otherwise
            the forecast is the `1 - optimism` quantile of the recent outputs that were longer than
            this one is now; at 1, one token.
        running: key request id.
    """

    def __init__(self, optimism: float, max_model_len: int, running: Mapping[str, Request]) -> None:
        self._running = running
        self._optimism = optimism
        self._max_model_len = max_model_len
        self._all = _Lengths([_PRIOR])
        self._by_class: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()

    def observe(self, request: Request) -> None:
        """Record the output of a request that ended."""
        key = _class_of(request)
        own = self._by_class.setdefault(key, _Lengths())
        self._by_class.move_to_end(key)
        if len(self._by_class) > _MOST_KNOWN:
            self._by_class.popitem(last=False)
        own.add(request.num_output_tokens)
        self._all.add(request.num_output_tokens)

    def expected_tokens(self, requests: Sequence[Request]) -> Counts:
        """Return the tokens that each request may need room for, at least one: [R]."""
        left = [self._left(request, self._optimism) for request in requests]
        return np.array(left, dtype=np.int64)

    def steady_left(self, request: Request) -> int:
        """Return the tokens until a stream's end, at least one, for promises that last until then.

        While few outputs of its tenant and class have ended, `max_tokens` is believed, if it ends
        in the first half of the context: one that is as good as not bounded tells nothing.
        """
        optimism = 0.0 if self._is_unknown(request) else self._optimism or _MEDIAN
        return self._left(request, optimism)

    def _is_unknown(self, request: Request) -> bool:
        own = self._by_class.get(_class_of(request))
        is_bounded = request.num_final_tokens <= self._max_model_len // 2
        return is_bounded and (own is None or len(own) < _ENOUGH)

    def _left(self, request: Request, optimism: float) -> int:
        allowed = max(1, request.num_final_tokens - request.num_tokens)
        if not optimism:
            return allowed
        name = _class_of(request)
        own = self._by_class.get(name)
        lengths = self._all if own is None or len(own) < _ENOUGH else own
        if lengths.is_outdated:
            running = self._running.values()
            lengths.update(
                r.num_output_tokens for r in running if lengths is self._all or _class_of(r) == name
            )
        return min(max(1, lengths.left(request.num_output_tokens, optimism)), allowed)


def _class_of(request: Request) -> tuple[str, str]:
    service = request.message.service
    return service.tenant, service.slo_class


class ExpectedEnds:
    """Plays running requests forward to their expected ends, all at the same pace.

    A request that ends returns its blocks and its time, and the others can grow into them. So the
    highest level on the way counts, not the sum at all ends (Gong et al., Past-Future Scheduler,
    ASPLOS 2025).
    """

    def __init__(self, running: Sequence[Request], lengths: OutputLengths, block_size: int) -> None:
        self._running = [*running]
        self._lengths = lengths
        self._block_size = block_size
        self._blocks: Counts | None = None  # as `_foresee_blocks` of the running; None: not asked
        self._streams: Counts | None = None  # as `_foresee_streams`
        self._asked: Request | None = None
        self._answer = 0

    def add(self, request: Request) -> None:
        """Add a running request."""
        self._running.append(request)
        self._blocks = self._streams = self._asked = None

    def peak_blocks(self, request: Request) -> int:
        """Return the peak growth in blocks if the request runs too.

        The growth is that beyond the blocks in use now and the request's first blocks.
        """
        if request is not self._asked:  # asked repeatedly for the next waiting request
            self._asked, self._answer = request, self._peak_blocks(request)
        return self._answer

    def stream_shapes(self, request: Request) -> list[StepShape]:
        """Return steps of all streams with a promise and the request, as `longest_steps`."""
        if self._streams is None:
            self._streams = self._foresee_streams(self._running)
        both = np.concatenate((self._streams, self._foresee_streams([request])), axis=1)
        return longest_steps(both[0], both[1], _MOST_MOMENTS)

    def _peak_blocks(self, request: Request) -> int:
        if self._blocks is None:
            self._blocks = self._foresee_blocks(self._running)
        both = np.concatenate((self._blocks, self._foresee_blocks([request])), axis=1)
        num_tokens, num_blocks = both[:, both[0].argsort()]
        given_back = num_blocks.cumsum() - num_blocks  # [R], before each end
        num_left = np.arange(len(num_tokens), 0, -1)
        grown = num_left * -(-num_tokens // self._block_size)
        return int((grown - given_back).max())

    def _foresee_blocks(self, requests: Sequence[Request]) -> Counts:
        """Return each request's tokens until its end, and present blocks that its end frees."""
        num_tokens = self._lengths.expected_tokens(requests)
        num_own = np.array([num_own_blocks(r, self._block_size) for r in requests], dtype=np.int64)
        return np.stack((num_tokens, num_own))  # [2, R]

    def _foresee_streams(self, requests: Sequence[Request]) -> Counts:
        """Return the keys that each stream with a promise reads, and its tokens until its end."""
        promised = [request for request in requests if not request.is_best_effort]
        contexts = np.array([request.num_tokens for request in promised], dtype=np.int64)
        left = [self._lengths.steady_left(request) for request in promised]
        return np.stack((contexts, np.array(left, dtype=np.int64)))  # [2, R]


def longest_steps(contexts: npt.NDArray[Any], left: npt.NDArray[Any], most: int) -> list[StepShape]:
    """Return steps of streams, at most so many, when they may take longest.

    From the step in which the streams read most keys on, each has less of everything; before it,
    rows become fewer and keys more.

    Args:
        contexts, left: keys that each stream reads now, and tokens until its end: [R], R > 0.
    """
    contexts, left = np.stack((contexts, left))[:, left.argsort()]
    rows = np.arange(len(left), 0, -1)
    keys = contexts[::-1].cumsum()[::-1] + rows * left
    moments = np.linspace(0, keys.argmax(), most).astype(np.int64)
    return [_decodes(int(rows[i]), float(keys[i])) for i in dict.fromkeys(moments.tolist())]


def num_own_blocks(request: Request, block_size: int) -> int:
    """Return the blocks of a request that no other shares: it may have found the rest cached."""
    return -(-(request.num_tokens - request.num_cached_tokens) // block_size)


def _decodes(num_rows: int, num_keys: float) -> StepShape:
    shape = StepShape()
    shape.num_decode_rows = shape.num_samples = num_rows
    shape.decode_context = num_keys
    return shape
