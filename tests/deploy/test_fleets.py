"""What deploy/ says of fleets, held to Legato, to Ray and to Kubernetes."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from legato.cli.flags import engine_config, given_fields, server_config
from legato.cli.main import full_parser
from legato.cli.values import duration_s
from legato.core.errors import ConfigError
from legato.fleet.config import FleetConfig
from legato.fleet.settings import FleetSettings, fleet_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.fleet.yaml").read_text())["services"]
SERVICE, POLICY = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text())
SERVED = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
[WORKERS] = CLUSTER["workerGroupSpecs"]


def commands() -> tuple[list[str], list[str]]:
    """What the first container runs: how Ray is started, and what then."""
    [script] = COMPOSE["legato"]["command"]
    ray, _, serve = script.partition(" && exec ")
    return shlex.split(ray), shlex.split(serve)


def settings(folder: Path) -> FleetSettings:
    """Of the application, with a file of keys that is here."""
    keys = folder / "keys"
    keys.write_text("one\ntwo\n")
    [application] = SERVED["applications"]
    assert application["import_path"] == "legato.fleet:app"
    return fleet_settings({**application["args"], "api_key_file": str(keys)})


def test_compose_starts_the_replicas_that_are_served() -> None:
    program, *command = commands()[1]
    assert program == "legato"
    args = full_parser().parse_args(command)
    engine_config(args)
    server, fleet = server_config(args), FleetConfig(**given_fields(args, FleetConfig))
    assert fleet.replicas == COMPOSE["replica"]["deploy"]["replicas"]
    assert server.host == "0.0.0.0"
    assert server.timeout_drain_s is not None
    assert server.timeout_drain_s < duration_s(COMPOSE["replica"]["stop_grace_period"])
    cores = COMPOSE["replica"]["command"]
    assert fleet.replica_cpus == float(cores[cores.index("--num-cpus") + 1])
    assert COMPOSE["replica"]["image"] == COMPOSE["legato"]["image"]


def test_ray_asks_for_a_token_wherever_it_can_be_reached() -> None:
    for service in COMPOSE.values():
        environment = service["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == f"/run/secrets/{service['secrets'][0]}"
    assert CLUSTER["authOptions"] == {"mode": "token"}


@pytest.mark.fleet
def test_ray_starts_as_compose_says() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed")
    head = commands()[0]
    for command in (head, [*COMPOSE["replica"]["entrypoint"], *COMPOSE["replica"]["command"]]):
        assert command[:2] == ["ray", "start"]
        scripts.start.make_context("start", command[2:])


def test_kubernetes_serves_what_there_is_room_for(tmp_path: Path) -> None:
    engine, server, fleet = settings(tmp_path)
    assert engine.scheduler.itl_slo_s
    assert server.api_keys == ("one", "two")
    [container] = WORKERS["template"]["spec"]["containers"]
    cores = int(container["resources"]["limits"]["cpu"])
    per_pod = cores // fleet.replica_cpus
    assert fleet.max_replicas is not None
    for pods, replicas in (
        (WORKERS["minReplicas"], fleet.replicas),
        (WORKERS["maxReplicas"], fleet.max_replicas),
    ):
        assert replicas <= pods * per_pod
        assert replicas * fleet.replica_cpus + 1 <= pods * cores  # the front door takes one


def test_what_is_mounted_on_kubernetes_is_there() -> None:
    [application] = SERVED["applications"]
    for group in (CLUSTER["headGroupSpec"], WORKERS):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert application["args"]["api_key_file"].startswith(mounts["keys"])


def test_ray_is_of_a_version_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [ray] = [Requirement(one) for one in project["optional-dependencies"]["fleet"]]
    assert ray.specifier.contains(CLUSTER["rayVersion"])


def test_kubernetes_knows_all_fields() -> None:
    """Those of pods and of the policy; KubeRay's own are in no package."""
    validate = pytest.importorskip("kubernetes_validate").validate
    groups: list[Any] = [CLUSTER["headGroupSpec"], WORKERS]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "pod"},
            "template": group["template"],
        }
        for group in groups
    ]
    for resource in (*pods, POLICY):
        validate(resource, "1.30", strict=True)


@pytest.mark.fleet
def test_ray_serve_knows_all_fields() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed")
    schema.ServeDeploySchema.model_validate(SERVED)


@pytest.mark.parametrize("kept", ["", None], ids=["empty", "missing"])
def test_a_file_without_keys_leaves_nothing_open(tmp_path: Path, kept: str | None) -> None:
    keys = tmp_path / "keys"
    if kept is not None:
        keys.write_text(kept)
    with pytest.raises(ConfigError, match="api_key_file"):
        fleet_settings({"api_key_file": str(keys)})


@pytest.mark.parametrize("told", [{"replicas": 0}, {"replicsa": 2}, {"itl_slo_s": "soon"}])
def test_settings_that_are_none_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        fleet_settings(told)


def test_settings_may_be_words() -> None:
    """As `serve run` has them."""
    told = fleet_settings({"replicas": "3", "itl_slo_s": "0.05", "routing": "round-robin"})
    assert told.fleet.replicas == 3
    assert told.engine.scheduler.itl_slo_s == 0.05
