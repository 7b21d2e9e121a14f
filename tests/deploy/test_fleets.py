"""What deploy/ says of fleets, held to Legato, to Ray, to routers and to Kubernetes."""

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
from legato.transfer.keys import read_key
from legato_fleet.config import FleetConfig, FleetSettings, check_fleet, fleet_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.fleet.yaml").read_text())["services"]
APART = yaml.safe_load((DEPLOY / "compose.disaggregated.yaml").read_text())["services"]
SERVICE = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
PATCH = yaml.safe_load((DEPLOY / "rayservice.disaggregated.yaml").read_text())
POLICY = yaml.safe_load((DEPLOY / "networkpolicy.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
[WORKERS] = CLUSTER["workerGroupSpecs"]

each_service = pytest.mark.parametrize("service", [SERVICE, PATCH], ids=["whole", "apart"])


def commands() -> tuple[list[str], list[str]]:
    """What the first container runs: how Ray is started, and what then."""
    [script] = COMPOSE["legato"]["command"]
    ray, _, serve = script.partition(" && exec ")
    return shlex.split(ray), shlex.split(serve)


def served(service: dict[str, Any]) -> dict[str, Any]:
    """What Ray Serve is told."""
    told: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return told


def args_of(service: dict[str, Any]) -> dict[str, Any]:
    """Those of the application."""
    [application] = served(service)["applications"]
    assert application["import_path"] == "legato.fleet:app"
    args: dict[str, Any] = application["args"]
    return args


def settings(service: dict[str, Any], folder: Path) -> FleetSettings:
    """Of the application, with a file of keys that is here."""
    keys = folder / "keys"
    keys.write_text("one\ntwo\n")
    told = fleet_settings(args_of(service) | {"api_key_file": str(keys)})
    check_fleet(told.engine, told.fleet, is_on_cluster=True)
    return told


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


@each_service
def test_kubernetes_serves_what_there_is_room_for(service: dict[str, Any], tmp_path: Path) -> None:
    engine, server, fleet = settings(service, tmp_path)
    assert engine.scheduler.itl_slo_s
    assert server.api_keys == ("one", "two")
    [container] = WORKERS["template"]["spec"]["containers"]
    cores = int(container["resources"]["limits"]["cpu"])
    per_pod = cores // fleet.replica_cpus
    for pods, replicas in (
        (WORKERS["minReplicas"], sum(pool.fewest for pool in fleet.pools)),
        (WORKERS["maxReplicas"], sum(pool.most for pool in fleet.pools)),
    ):
        assert replicas <= pods * per_pod
        assert replicas * fleet.replica_cpus + 1 <= pods * cores  # the front door takes one


@each_service
def test_what_is_mounted_on_kubernetes_is_there(service: dict[str, Any]) -> None:
    files = [value for name, value in args_of(service).items() if name.endswith("_file")]
    for group in (CLUSTER["headGroupSpec"], WORKERS):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert {str(Path(file).parent) for file in files} == {mounts["keys"]}


def test_a_patch_leaves_the_rest_as_it_is() -> None:
    assert PATCH.keys() == {"spec"}
    assert PATCH["spec"].keys() == {"serveConfigV2"}
    whole, apart = served(SERVICE), served(PATCH)
    for one in (whole, apart):
        del one["applications"][0]["args"]
    assert whole == apart


def test_compose_joins_two_roles_by_a_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sixteen bytes or more of it")
    for role in ("prefill", "decode"):
        service = APART[role]
        [secret] = service["secrets"]
        told = [str(key) if one == f"/run/secrets/{secret}" else one for one in service["command"]]
        args = full_parser().parse_args(told)
        transfer, server = engine_config(args).transfer, server_config(args)
        assert (transfer.kv_role, transfer.kv_transfer_host) == (role, role)
        assert read_key(transfer) == key.read_bytes()
        assert server.timeout_drain_s is not None
        assert server.timeout_drain_s < duration_s(service["stop_grace_period"])
        asked = APART["router"]["command"]
        assert asked[asked.index(f"--{role}") + 1] == f"http://{role}:{server.port}"


@pytest.mark.fleet
def test_the_router_knows_its_flags() -> None:
    router = pytest.importorskip("vllm_router.launch_router", reason="vllm-router is not installed")
    args = router.parse_router_args(APART["router"]["command"][1:])
    assert args.vllm_pd_disaggregation


def test_ray_is_of_a_version_that_is_installed() -> None:
    package = ROOT / "packages" / "fleet" / "pyproject.toml"
    project = tomllib.loads(package.read_text())["project"]
    [ray] = [Requirement(one) for one in project["optional-dependencies"]["ray"]]
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
@each_service
def test_ray_serve_knows_all_fields(service: dict[str, Any]) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed")
    schema.ServeDeploySchema.model_validate(served(service))


@pytest.mark.parametrize("kept", ["", None], ids=["empty", "missing"])
def test_a_file_without_keys_leaves_nothing_open(tmp_path: Path, kept: str | None) -> None:
    keys = tmp_path / "keys"
    if kept is not None:
        keys.write_text(kept)
    for name in ("api_key_file", "admin_api_key_file"):
        with pytest.raises(ConfigError, match=f"^{name}"):
            fleet_settings({name: str(keys)})


def test_admins_have_a_file_of_keys_of_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("root\n")
    server = fleet_settings({"admin_api_key_file": str(keys), "api_keys": ["one"]}).server
    assert (server.api_keys, server.admin_api_keys) == (("one",), ("root",))


@pytest.mark.parametrize("told", [{"replicas": 0}, {"replicsa": 2}, {"itl_slo_s": "soon"}])
def test_settings_that_are_none_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        fleet_settings(told)


def test_settings_may_be_words() -> None:
    """As `serve run` has them."""
    told = fleet_settings({"replicas": "3", "itl_slo_s": "0.05", "routing": "round-robin"})
    assert told.fleet.replicas == 3
    assert told.engine.scheduler.itl_slo_s == 0.05
