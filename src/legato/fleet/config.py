"""Settings of a fleet."""

from typing import Annotated, Literal

import msgspec

from legato.core.config_fields import Config, Count, Flag, Seconds
from legato.core.errors import ConfigError
from legato.routing.scaling import SLOWER_S, SOONER_S

Routing = Literal["kept-promise", "prefix-affinity", "power-of-two", "round-robin"]


class FleetConfig(Config, frozen=True, kw_only=True):
    """How many replicas there are, and how requests are shared among them."""

    flag_group = "fleet"

    replicas: Annotated[Count, Flag("engines, each with the whole model")] = 2
    max_replicas: Annotated[
        Count | None,
        Flag(
            "start more of them, up to so many, where promises are about to be broken",
            default="as many as --replicas",
        ),
    ] = None
    upscale_delay_s: Annotated[
        Seconds, Flag("how long promises must be in danger before more replicas are started")
    ] = SOONER_S
    downscale_delay_s: Annotated[
        Seconds, Flag("how long fewer replicas must do before one is ended")
    ] = SLOWER_S
    routing: Annotated[
        Routing,
        Flag("how a replica is chosen: where a request's promise is most likely kept, or simpler"),
    ] = "kept-promise"
    replica_cpus: Annotated[
        float,
        msgspec.Meta(ge=0.0),
        Flag("processor cores that Ray keeps for each replica"),
    ] = 1.0
    replica_gpus: Annotated[
        float, msgspec.Meta(ge=0.0), Flag("GPUs that Ray keeps for each replica")
    ] = 0.0
    simulate: Annotated[
        str | None,
        Flag(
            "compute nothing: steps of replicas only last as this profile says, which `legato "
            "simulate` has or a file; tokens are made up",
            metavar="PROFILE",
            default="the model is computed",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        Flag(
            "of the Ray cluster to run on, such as auto",
            metavar="ADDRESS",
            default="one is started on this machine, and ended with the fleet",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas must be at least the {self.replicas} replicas, got "
                f"{self.max_replicas}"
            )
