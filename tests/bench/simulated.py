"""What the tests of the simulator share."""

from legato.bench.load.record import RequestRecord
from legato.bench.simulation.policies import parse_policy
from legato.bench.simulation.profiled_server import SimulatedServer
from legato.bench.simulation.profiles import PROFILES
from legato.bench.simulation.run import simulate
from legato.bench.workload.requests import Workload
from legato.core.config import SchedulerConfig

CPU = PROFILES["smollm2-135m-cpu"]


def serve(
    policy: str, common: SchedulerConfig, workload: Workload, seed: int = 0
) -> list[RequestRecord]:
    """Records of a workload on the simulated CPU."""
    server = SimulatedServer(profile=CPU, scheduler=parse_policy(policy, common), seed=seed)
    return simulate(server, workload).records
