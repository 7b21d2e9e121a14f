"""Makes machines of profiles of any kind, and writes machines as profiles."""

import random
from pathlib import Path

from legato.engine.calibration.calibration_file import shape_counts, write_profile
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.machine import Machine
from legato_lab.simulation.profile_file import ProfileFile
from legato_lab.simulation.profiled_server import calibrate
from legato_lab.simulation.profiles import load_profile
from legato_lab.simulation.step_errors import StepErrors

_NOISE = 0.05
_NUM_ERRORS = 256
_TURNAROUND_S = 0.5e-3
_MAX_NUM_SEQS = 256


def load_machine(source: str) -> Machine:
    """Load the machine of a profile, by its name or file.

    Missing data is assumed: a calibration to within 5 %; errors of steps as in the calibration, or
    of 5 %; and half a millisecond between two steps.

    Raises:
        ConfigError: there is no such profile.
    """
    profile = load_profile(source)
    rng = random.Random(0)
    noise = tuple(rng.lognormvariate(0.0, _NOISE) for _ in range(_NUM_ERRORS))
    assumed = StepErrors(decodes=noise, prefills=noise)
    if profile.steps:
        assumed = StepErrors.of(profile.steps, profile.costs)
    return Machine(
        belief=profile.steps
        or calibrate(
            profile.costs,
            max_model_len=profile.max_model_len,
            max_num_seqs=_MAX_NUM_SEQS,
            most_drafts=_MAX_NUM_SEQS,
            noise=_NOISE,
            seed=0,
        ),
        costs=profile.costs,
        errors=profile.errors or assumed,
        delays=profile.delays or Delays(turnaround_s=_TURNAROUND_S),
        max_model_len=profile.max_model_len,
        kv_cache_tokens=profile.kv_cache_tokens,
    )


def write_machine(path: Path, machine: Machine, about: dict[str, str]) -> None:
    """Write a measured machine as a profile; create the folder if it is missing.

    Args:
        about: what the figures depend on: model, device, ...
    """
    write_profile(
        path,
        ProfileFile(
            figures="measured",
            about=about,
            steps=[(shape_counts(shape), seconds) for shape, seconds in machine.belief],
            rows=machine.costs.rows,
            costs=machine.costs,
            errors=machine.errors,
            delays=machine.delays,
            max_model_len=machine.max_model_len,
            kv_cache_tokens=machine.kv_cache_tokens,
        ),
    )
