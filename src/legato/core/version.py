"""The version of this package, and how to install what it lacks."""

import shutil
import sys
from pathlib import Path

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """Return the command that adds an extra of `legato-llm` to this Python."""
    found = shutil.which("pip")
    # In a clone, `make serve` installs beside a Python that no shell has activated.
    is_own = found is not None and Path(found).parent == Path(sys.executable).parent
    pip = "pip" if is_own else f"{sys.executable} -m pip"
    return f"{pip} install 'legato-llm[{extra}]'"
