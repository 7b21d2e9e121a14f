from collections.abc import Mapping, Sequence

def has_amx() -> bool: ...

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...

class Step:
    def __init__(
        self,
        chunks: Sequence[tuple[int, int, int, list[int]]],
        slots: list[int],
        shape: tuple[int, int, int],
        group: int,
        num_threads: int,
    ) -> None: ...

class Layer:
    def __init__(
        self, sizes: tuple[int, int, int, int, int], eps: float, weights: Mapping[str, int]
    ) -> None: ...

class Layers:
    def __init__(self, layers: list[Layer]) -> None: ...
    def forward(
        self,
        pool: ThreadPool,
        step: Step,
        caches: Sequence[tuple[int, int, int]],
        hidden: int,
        num_rows: int,
        cos: int,
        sin: int,
    ) -> None: ...

class Matrix:
    def __init__(self, weight: Mapping[str, int], num_outputs: int, depth: int) -> None: ...
    def multiply(self, pool: ThreadPool, rows: int, num_rows: int, out: int) -> None: ...
