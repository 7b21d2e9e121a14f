"""`legato`, but that its engine is the one beside this file.

python -m benchmarks.token_cost.server STEP_S serve [flags of `legato serve`]
"""

import sys

from legato.cli.main import main
from legato.engine.process import engine_process

if __name__ == "__main__":
    module, step_s = "benchmarks.token_cost.engine", sys.argv.pop(1)
    engine_process._PROGRAM = (sys.executable, "-m", module, step_s)  # type: ignore[assignment]
    sys.exit(main())
