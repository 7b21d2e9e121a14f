"""Measurements of Legato, each run by one command; see docs/contributing/benchmarks.md."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("legato") is None:
    # A clone that is not installed, as on a machine that is only lent; its processes need it, too.
    _ROOT = Path(__file__).parents[1]
    _SOURCES = [str(_ROOT / "src"), *map(str, sorted(_ROOT.glob("packages/*/src")))]
    sys.path[:0] = _SOURCES
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*_SOURCES, os.environ.get("PYTHONPATH")])
    )
