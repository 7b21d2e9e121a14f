"""A machine that was never measured, for tests of what is."""

from legato_lab.simulation.clients import Delays
from legato_lab.simulation.machine import Machine
from legato_lab.simulation.profiled_server import calibrate
from legato_lab.simulation.profiles import PROFILES

PROFILE = PROFILES["smollm2-135m-cpu"]
DELAYS = Delays(
    turnaround_s=1e-3,
    turnaround_token_s=0.1e-3,
    intake_s=5e-3,
    intake_token_s=1e-6,
    delivery_s=1e-3,
    delivery_token_s=0.3e-3,
)
CALIBRATION = calibrate(PROFILE.costs, max_model_len=8192, max_num_seqs=64, noise=0.02, seed=0)
CPU = Machine.fit(
    CALIBRATION, [], delays=DELAYS, max_model_len=8192, kv_cache_tokens=PROFILE.kv_cache_tokens
)
