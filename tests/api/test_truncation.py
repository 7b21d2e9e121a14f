"""Which turns of a conversation are left out where it is too long."""

from hypothesis import given
from hypothesis import strategies as st

from legato.api.responses.input_items import (
    FunctionCallItem,
    Item,
    MessageItem,
    Placed,
    ToolOutputItem,
    truncated,
)
from tests.profiles import examples

_roles = st.sampled_from(["system", "developer", "user", "assistant", "call", "output"])


def _item(role: str) -> Item:
    if role == "call":
        return FunctionCallItem(type="function_call", call_id="c", name="f", arguments="{}")
    if role == "output":
        return ToolOutputItem.model_validate(
            {"type": "function_call_output", "call_id": "c", "output": "x"}
        )
    return MessageItem.model_validate({"role": role, "content": "Hi"})


@examples(200)
@given(roles=st.lists(_roles, min_size=1, max_size=12), most=st.integers(0, 12))
def test_as_few_turns_go_as_can(roles: list[str], most: int) -> None:
    items: list[Placed] = [(str(i), _item(role)) for i, role in enumerate(roles)]
    kept = truncated(items, lambda some: len(some) <= most)
    indices = [int(name) for name, _ in kept]
    dropped = sorted(set(range(len(roles))) - set(indices))
    assert indices == sorted(indices)
    assert all(roles[i] not in ("system", "developer") for i in dropped)
    if len(roles) <= most:
        assert not dropped
    if not dropped:
        return
    last = dropped[-1]
    rest = [i for i in indices if i > last and roles[i] not in ("system", "developer")]
    assert roles[rest[0]] == "user", "a turn is left out whole"
    turns = [i for i, role in enumerate(roles) if role == "user"]
    if len(kept) > most:
        assert rest[0] == turns[-1], "it does not fit, whatever goes"
    before = [i for i in turns if i <= last] or [0]
    without = [i for i in range(before[-1]) if roles[i] not in ("system", "developer")]
    assert len(roles) - len(without) > most, "one turn more would have fitted"
