"""Programs of another checkout, to compare with this one."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parents[2]

# An editable installation finds its packages before PYTHONPATH is looked at.
_SITE = """import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
import legato
legato.__path__.append({kernels!r})
"""


def environment(checkout: Path, out: Path) -> Mapping[str, str]:
    """Return an environment in which Python, and its children, run a checkout's sources.

    Compiled kernels are those of this installation.

    Args:
        out: a folder to write to.
    """
    spec = find_spec("legato._processor")
    kernels = "" if spec is None or spec.origin is None else str(Path(spec.origin).parent)
    folder = out / "site"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE.format(kernels=kernels), encoding="utf-8")
    there = checkout.resolve()
    paths = (folder.resolve(), there / "src", *sorted(there.glob("packages/*/src")), HERE)
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
