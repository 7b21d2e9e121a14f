"""What the tests of the simulator share."""

from legato.bench.policies import parse_policy
from legato.bench.profiles import PROFILES
from legato.bench.record import RequestRecord
from legato.bench.simulation import SimulatedServer, simulate
from legato.bench.workload import Workload
from legato.core.config import SchedulerConfig

CPU = PROFILES["smollm2-135m-cpu"]


def serve(
    policy: str, common: SchedulerConfig, workload: Workload, seed: int = 0
) -> list[RequestRecord]:
    """Records of a workload on the simulated CPU."""
    server = SimulatedServer(profile=CPU, scheduler=parse_policy(policy, common), seed=seed)
    return simulate(server, workload).records
