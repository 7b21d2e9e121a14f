"""What is kept beside blocks of the tree: windows' copies of them, and checkpoints."""

from collections.abc import Sequence

from legato.kv.path_ends import Reach
from legato.kv.state_slots import StateSlots
from legato.kv.window_groups import WindowGroups


class Dependents:
    """Copies and checkpoints are known by their block's key, and leave the cache with the block."""

    def __init__(
        self, windows: WindowGroups | None = None, states: StateSlots | None = None
    ) -> None:
        self._windows = windows
        self._states = states

    @property
    def reaches(self) -> list[Reach]:
        """What a hit needs besides blocks of the tree."""
        groups = () if self._windows is None else self._windows.groups
        reaches = [Reach(group.num_visible_blocks, group) for group in groups]
        if self._states is not None:
            reaches.append(Reach(1, self._states.checkpoints))
        return reaches

    def moved(self, keys: Sequence[int], new_keys: Sequence[int]) -> None:
        """Record that blocks have other keys, in other places."""
        if self._windows is not None:
            self._windows.rename(keys, new_keys)
        if self._states is not None:
            self._states.checkpoints.rename(keys, new_keys)

    def gone(self, keys: Sequence[int]) -> None:
        """Forget what belongs to blocks that are about to leave the tree."""
        if self._windows is not None:
            self._windows.forget(keys)
        if self._states is not None:
            self._states.forget(keys)
