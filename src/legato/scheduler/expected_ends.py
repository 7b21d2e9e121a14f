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

_REDRAWN = 1 / 32
"""A survival curve is drawn again after so many new ends, as a share of those it is made of."""

Counts = npt.NDArray[np.int64]
_Class = tuple[str, str]


class _Lengths:
    """Lengths of recent outputs, and their survival curve.

    The curve counts running outputs up to where they are (Kaplan and Meier, 1958): the first
    outputs to end after a start are the short ones.

    Args:
        optimism: in (0, 1]; see `OutputLengths`.
    """

    def __init__(self, optimism: float, first: Sequence[int] = ()) -> None:
        self._optimism = optimism
        self._recent = deque(first, maxlen=_WINDOW)
        self._num_new = len(self._recent)  # since the curve was drawn
        self._ends: list[int] = []  # lengths at which outputs ended, ascending
        self._ended: list[float] = []  # share of all outputs that has ended at each of these
        self._longest = 0
        self._left: dict[int, int] = {}  # answers of `left` by this curve

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def is_outdated(self) -> bool:
        return self._num_new > _REDRAWN * len(self._recent)

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._num_new += 1

    def draw(self, running: Iterable[int]) -> None:
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
        self._left.clear()
        self._num_new = 0

    def left(self, num_generated: int) -> int:
        """Return how many tokens an output still generates: the quantile of the longer ones.

        An output longer than all that are known is expected to last as long again (Lindy's law).
        """
        left = self._left.get(num_generated)
        if left is None:
            left = self._left[num_generated] = self._read(num_generated)
        return left

    def _read(self, num_generated: int) -> int:
        first_longer = bisect_right(self._ends, num_generated)
        if self._optimism == 1.0 and first_longer < len(self._ends):
            return 1
        ended = self._ended[first_longer - 1] if first_longer else 0.0
        within = ended + (1.0 - self._optimism) * (1.0 - ended)
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
        self._most_bounded = max_model_len // 2
        self._all = _Lengths(optimism or _MEDIAN, [_PRIOR])
        self._by_class: OrderedDict[_Class, _Lengths] = OrderedDict()

    def observe(self, request: Request) -> None:
        """Record the output of a request that ended."""
        name = _class_of(request)
        own = self._by_class.get(name)
        if own is None:
            own = self._by_class[name] = _Lengths(self._optimism or _MEDIAN)
        self._by_class.move_to_end(name)
        if len(self._by_class) > _MOST_KNOWN:
            self._by_class.popitem(last=False)
        own.add(request.num_output_tokens)
        self._all.add(request.num_output_tokens)

    def expected(self, requests: Sequence[Request]) -> Counts:
        """Return the tokens until each request's end, at least one, as two forecasts: [R, 2].

        The first is for memory, by the optimism. The second is for promises that last until the
        end. While few outputs of its tenant and class have ended, that one believes `max_tokens`,
        if it ends in the first half of the context: one that is as good as not bounded tells
        nothing.
        """
        by_class: dict[_Class, tuple[_Lengths, bool]] = {}
        known: list[tuple[int, bool, int, int]] = []
        for request in requests:
            name = _class_of(request)
            found = by_class.get(name)
            if found is None:
                found = by_class[name] = self._of(name)
            lengths, is_own = found
            num_output = request.num_tokens - request.num_prompt_tokens
            num_left = lengths.left(num_output)
            known.append((num_left, is_own, request.num_final_tokens, request.num_tokens))
        left, own, final, num_tokens = np.array(known, dtype=np.int64).reshape(-1, 4).T
        allowed = np.maximum(1, final - num_tokens)
        left = np.minimum(left, allowed)
        is_believed = (own == 0) & (final <= self._most_bounded)
        memory = left if self._optimism else allowed
        return np.stack((memory, np.where(is_believed, allowed, left)), axis=1)

    def steady_left(self, request: Request) -> int:
        """Return the second forecast of `expected` for one request."""
        return self._expected(request, *self._of(_class_of(request)))[1]

    def _of(self, name: _Class) -> tuple[_Lengths, bool]:
        """Return the lengths to count on, and whether they are of the class itself."""
        lengths = self._by_class.get(name)
        is_own = lengths is not None and len(lengths) >= _ENOUGH
        if lengths is None or not is_own:
            lengths = self._all
        if lengths.is_outdated:
            running = self._running.values()
            lengths.draw(r.num_output_tokens for r in running if not is_own or _class_of(r) == name)
        return lengths, is_own

    def _expected(self, request: Request, lengths: _Lengths, is_own: bool) -> tuple[int, int]:
        allowed = max(1, request.num_final_tokens - request.num_tokens)
        left = min(lengths.left(request.num_output_tokens), allowed)
        is_believed = not is_own and request.num_final_tokens <= self._most_bounded
        return left if self._optimism else allowed, allowed if is_believed else left


def _class_of(request: Request) -> _Class:
    service = request.message.service
    return service.tenant, service.slo_class


class ExpectedEnds:
    """Plays running requests forward to their expected ends, all at the same pace.

    A request that ends returns its blocks and its time, and the others can grow into them. So the
    highest level on the way counts, not the sum at all ends (Gong et al., Past-Future Scheduler,
    ASPLOS 2025).
    """

    def __init__(self, running: Iterable[Request], lengths: OutputLengths, block_size: int) -> None:
        self._lengths = lengths
        self._block_size = block_size
        self._ids: dict[str, int] = {}  # key request id, value its row
        self._rows = self._foresee([])
        self._asked = "", self._rows  # the last request that was asked for, and its row
        self._add([*running])

    def add(self, request: Request) -> None:
        """Add a running request."""
        self._add([request])

    def remove(self, request: Request) -> None:
        """Remove a request that no longer runs."""
        gone = self._ids.pop(request.request_id)
        self._rows = np.delete(self._rows, gone, axis=0)
        self._ids = {name: row - (row > gone) for name, row in self._ids.items()}

    def peak_blocks(self, request: Request, without: Iterable[Request] = ()) -> int:
        """Return the peak growth in blocks if the request runs too.

        The growth is that beyond the blocks in use now and the request's first blocks.

        Args:
            without: running requests to leave out.
        """
        rows = self._with(request, without)
        num_tokens, num_blocks = rows[rows[:, 0].argsort()][:, (0, 3)].T
        given_back = num_blocks.cumsum() - num_blocks  # [R], before each end
        num_left = np.arange(len(num_tokens), 0, -1)
        grown = num_left * -(-num_tokens // self._block_size)
        return int((grown - given_back).max())

    def stream_shapes(self, request: Request, without: Iterable[Request] = ()) -> list[StepShape]:
        """Return steps of all streams with a promise and the request, as `longest_steps`."""
        rows = self._with(request, without)
        promised = rows[rows[:, 4] == 1]
        return longest_steps(promised[:, 2], promised[:, 1], _MOST_MOMENTS)

    def _add(self, requests: Sequence[Request]) -> None:
        for row, request in enumerate(requests, len(self._ids)):
            self._ids[request.request_id] = row
        self._rows = np.concatenate((self._rows, self._foresee(requests)))

    def _with(self, request: Request, without: Iterable[Request]) -> Counts:
        if self._asked[0] != request.request_id:
            self._asked = request.request_id, self._foresee([request])
        left_out = [self._ids[one.request_id] for one in without]
        rows = np.delete(self._rows, left_out, axis=0) if left_out else self._rows
        return np.concatenate((rows, self._asked[1]))

    def _foresee(self, requests: Sequence[Request]) -> Counts:
        """Return two forecasts of each request's end, its keys, own blocks, and if promised."""
        present = [(r.num_tokens, r.num_cached_tokens, r.is_best_effort) for r in requests]
        num_tokens, num_cached, best_effort = np.array(present, dtype=np.int64).reshape(-1, 3).T
        own_blocks = -(-(num_tokens - num_cached) // self._block_size)
        expected = self._lengths.expected(requests)
        return np.column_stack((expected, num_tokens, own_blocks, 1 - best_effort))  # [R, 5]


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
