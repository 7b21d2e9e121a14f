"""The page of seams lists the protocols of the sources."""

import re

from scripts import seams

from tests import house

ONE_USER = {
    # The model calls back into a floor above its own.
    "LayerWatch",
}


def test_page_is_up_to_date() -> None:
    assert seams.PAGE.read_text(encoding="utf-8") == seams.text(), "run `make docs`"


def test_every_protocol_is_listed() -> None:
    named = [
        name
        for file in house.sources()
        for name in re.findall(r"^class (\w+)\(.*\bProtocol\)", file.read_text(), re.MULTILINE)
    ]
    assert len(named) > 20
    assert sorted(named) == sorted(seam.protocol.name for seam in seams.seams())


def test_implementations_are_found() -> None:
    found = {
        seam.protocol.name: {cls.name for cls in seam.implementations} for seam in seams.seams()
    }
    assert {"SimulatedExecutor", "TorchExecutor"} <= found["Executor"]
    assert found["EngineListener"] >= {"EngineClient"}
    assert "Scheduler" not in found["Executor"]


def test_every_seam_has_two_users() -> None:
    lonely = {seam.protocol.name for seam in seams.seams() if len(seam.implementations) < 2}
    assert lonely == ONE_USER
