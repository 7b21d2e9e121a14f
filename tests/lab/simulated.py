"""What the tests of the simulator share."""

from legato.core.config import SchedulerConfig
from legato_lab.simulation.policies import parse_policy
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.profiles import PROFILES
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.workload import Workload

CPU = PROFILES["smollm2-135m-cpu"]


def serve(
    policy: str, common: SchedulerConfig, workload: Workload, seed: int = 0
) -> list[RequestRecord]:
    """Records of a workload on the simulated CPU."""
    server = SimulatedServer(profile=CPU, scheduler=parse_policy(policy, common), seed=seed)
    return simulate(server, workload).records
