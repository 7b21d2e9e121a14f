"""Measurements of Legato, each run by one command; see docs/contributing/benchmarks.md."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("legato") is None:
    # A clone that is not installed, as on a machine that is only lent; its processes need it, too.
    _SOURCE = str(Path(__file__).parents[1] / "src")
    sys.path.insert(0, _SOURCE)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_SOURCE, os.environ.get("PYTHONPATH")])
    )
