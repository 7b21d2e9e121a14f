"""What the tests of the simulator share."""

from legato.core.config import SchedulerConfig
from legato.simulation.policies import parse_policy
from legato.simulation.profiled_server import SimulatedServer
from legato.simulation.profiles import PROFILES
from legato.simulation.record import RequestRecord
from legato.simulation.simulated_run import simulate
from legato.simulation.workload import Workload

CPU = PROFILES["smollm2-135m-cpu"]


def serve(
    policy: str, common: SchedulerConfig, workload: Workload, seed: int = 0
) -> list[RequestRecord]:
    """Records of a workload on the simulated CPU."""
    server = SimulatedServer(profile=CPU, scheduler=parse_policy(policy, common), seed=seed)
    return simulate(server, workload).records
