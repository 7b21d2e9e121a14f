"""An engine process whose bookkeeping raises for requests whose names say so.

    python -m tests.engine.raising_engine FD

Everything is real but the executor. What raises are parts of the engine: the order of the queue for
a request that begins with "order", and telling the state once such a request has come. A request
that begins with "surrogate" fails in a step, with a message that goes into no frame.
"""

import sys

from legato.core.config import EngineConfig
from legato.core.plan import StepPlan
from legato.core.request import Request
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.main import main
from legato.engine.process.engine_messages import EngineInfo
from tests.engine.fake_engine import INFO
from tests.engine.test_engine_loop import Engine


class BookkeepingError(Exception):
    """What a part raises."""


def raise_for(name: str, request_id: str) -> None:
    if request_id.startswith(name):
        raise BookkeepingError(request_id)


def find_fault(plan: StepPlan) -> Exception | None:
    is_unsayable = any(chunk.request_id.startswith("surrogate") for chunk in plan.chunks)
    return ValueError("\ud800") if is_unsayable else None


def build(_: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    engine = Engine(find_fault)
    raise_in_order(engine)
    return engine, INFO


def raise_in_order(engine: Engine) -> None:
    """Have the order of the queue, a policy, raise; and the outlook from then on."""
    queues = engine._scheduler._queues
    order, outlook = queues.order, engine._scheduler._outlook
    ttft_s = outlook.ttft_s
    has_raised = False

    def raising(request: Request, alone_s: float) -> float:
        nonlocal has_raised
        has_raised |= request.request_id.startswith("order")
        raise_for("order", request.request_id)
        return order(request, alone_s)

    def told(now_s: float) -> tuple[float, float]:
        if has_raised:
            raise BookkeepingError("the outlook")
        return ttft_s(now_s)

    queues.order = raising
    outlook.ttft_s = told  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), build))
