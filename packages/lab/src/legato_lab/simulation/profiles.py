"""Machines to simulate, each with the costs of a model's steps."""

from pathlib import Path

import msgspec

from legato.core.errors import ConfigError
from legato.engine.calibration.calibration_file import Figures
from legato.scheduler.cost_fit import MeasuredStep, fit
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.profile_file import ProfileFile, read_profile
from legato_lab.simulation.published import rooflines
from legato_lab.simulation.roofline import Roofline
from legato_lab.simulation.step_errors import StepErrors

_TOLD = ("errors", "delays", "max_model_len", "kv_cache_tokens", "kv_token_bytes")
"""Fields of a profile that its file may set."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine.

    Attributes:
        figures: their origin.
        steps: of the idle engine, if measured.
        errors: of single steps, if measured.
        delays: time outside of steps, if measured.
        max_model_len: longest prompt plus output in tokens.
        kv_cache_tokens: tokens whose keys and values fit into the memory.
        kv_token_bytes: size of a token's keys and values, for transfers between machines; None if
            unknown.
    """

    figures: Figures = "assumed"
    costs: StepCosts
    steps: list[MeasuredStep] = []
    errors: StepErrors | None = None
    delays: Delays | None = None
    max_model_len: int = 8192
    kv_cache_tokens: int = 131_072
    kv_token_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.kv_cache_tokens < self.max_model_len:
            raise ConfigError(
                f"a request of max_model_len {self.max_model_len} tokens does not fit into a cache "
                f"of {self.kv_cache_tokens}"
            )

    @classmethod
    def of_roofline(cls, roofline: Roofline, figures: Figures) -> "Profile":
        """Make a profile with the model's whole context and all of the memory."""
        return cls(
            figures=figures,
            costs=roofline.costs,
            max_model_len=min(roofline.model.max_position_embeddings, roofline.kv_cache_tokens),
            kv_cache_tokens=roofline.kv_cache_tokens,
            kv_token_bytes=roofline.kv_token_bytes,
        )

    @classmethod
    def of_file(cls, file: ProfileFile, roofline: Roofline | None) -> "Profile":
        """Make a profile of a file; the roofline or the defaults fill in the rest."""
        profile = (
            cls(figures=file.figures, costs=file.costs or fit(file.measured_steps, file.rows))
            if roofline is None
            else cls.of_roofline(roofline, file.figures)
        )
        told = {name: value for name in _TOLD if (value := getattr(file, name)) is not None}
        return msgspec.structs.replace(profile, steps=file.measured_steps, **told)


def load_profile(source: str) -> Profile:
    """Load a profile: a key of `PROFILES`, or a file.

    Raises:
        ConfigError: it is neither.
    """
    if source in PROFILES:
        return PROFILES[source]
    try:
        return Profile.of_file(*read_profile(Path(source)))
    except FileNotFoundError as error:
        names = "\n".join(f"  {line}" for line in described_profiles())
        raise ConfigError(f"no file or profile {source!r}; profiles are:\n{names}") from error


def described_profiles() -> list[str]:
    """Return a line for each of `PROFILES`."""
    shape = StepShape()
    shape.add_decode(1000)
    return [
        f"{name:24} {profile.figures:9}  {1e3 * profile.costs.seconds(shape):5.1f} ms a decode, "
        f"context {profile.max_model_len:,}, cache {profile.kv_cache_tokens:,} tokens"
        for name, profile in PROFILES.items()
    ]


PROFILES = {
    # Two cores of a Xeon.
    "smollm2-135m-cpu": Profile(
        figures="measured",
        costs=StepCosts(
            step_s=24e-3,
            row_s=(20e-6, 190e-6, 270e-6, 250e-6, 270e-6),
            decode_row_s=0.8e-3,
            decode_context_s=3.6e-6,
            chunk_s=5e-3,
            area_s=0.105e-6,
            context_s=5e-6,
            sample_s=25e-6,
            # Ratios to a decode's costs, from one calibration on an EPYC that was not idle.
            draft_row_s=0.4e-3,
            draft_context_s=0.9e-6,
        ),
        kv_token_bytes=2 * 30 * 3 * 64 * 2,
    ),
    # Eight-bit weights of 7B parameters on a server's processor, at 350 GB/s: 57 KB of keys and
    # values a token at the 50 GB/s that attention reaches, and 12 TFLOP/s in products.
    "7b-gqa-cpu": Profile(
        costs=StepCosts(
            step_s=20e-3,
            row_s=(50e-6, 0.4e-3, 1.2e-3, 1.2e-3, 1.2e-3),
            decode_row_s=0.25e-3,
            decode_context_s=1.1e-6,
            chunk_s=1e-3,
            area_s=0.04e-6,
            context_s=1.1e-6,
            sample_s=0.1e-3,
        ),
        max_model_len=131_072,
        kv_cache_tokens=524_288,
        kv_token_bytes=57_344,
    ),
    **{name: Profile.of_roofline(roofline, "published") for name, roofline in rooflines().items()},
}
"""Key the name for `--profile`."""
