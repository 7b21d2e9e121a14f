"""deploy/kubernetes and deploy/chart: one server, said twice and held to Legato and Kubernetes.

Where Helm is installed, it renders the chart; everywhere, `rendered` does, which knows the few
actions that the chart uses.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from legato.api.http.middleware import OPEN_PATHS
from legato.cli.flags import engine_config, server_config
from legato.cli.main import full_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
_KUSTOMIZATION = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
KUSTOMIZATION = yaml.safe_load(_KUSTOMIZATION)
MONITORED = yaml.safe_load(_KUSTOMIZATION.replace("# - podmonitor", "- podmonitor"))
CHART = DEPLOY / "chart"
TEMPLATE = (CHART / "templates" / "legato.yaml").read_text()
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
_ACTION = re.compile(r"(\s*\{\{-.*?\}\}|\{\{.*?\}\})")
_HOOK_S = 5
_MARGIN_S = 10

Objects = dict[str, Any]


def labelled(kustomization: Any = KUSTOMIZATION) -> Objects:
    """The objects of deploy/kubernetes, as kustomize labels them; key the kind."""
    [labels] = [one["pairs"] for one in kustomization["labels"]]
    told: Objects = {}
    for name in kustomization["resources"]:
        one = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())
        one["metadata"]["labels"] = labels
        told[one["kind"]] = one
    told["Service"]["spec"]["selector"] = labels
    told["Deployment"]["spec"]["selector"] = {"matchLabels": labels}
    told["Deployment"]["spec"]["template"]["metadata"] = {"labels": labels}
    return told


def rendered(values: dict[str, Any]) -> Objects:
    """The chart's objects for a release called "legato"; key the kind."""
    scope = {"Values": {**VALUES, **values}, "Release": {"Name": "legato"}}
    blocks: list[tuple[bool, Any]] = [(True, scope)]  # whether each is shown, and its dot
    text = ""
    for part in _ACTION.split(TEMPLATE):
        is_shown, dot = blocks[-1]
        if "{{" not in part:
            text += part if is_shown else ""
            continue
        lead, action = part.split("{{")
        action = action.removeprefix("-").removesuffix("}}").strip()
        word, _, rest = action.partition(" ")
        if word == "end":
            blocks.pop()
        elif word in ("if", "with"):
            value = evaluated(rest, dot) if is_shown else None
            blocks.append((bool(value), value if word == "with" else dot))
        elif is_shown:
            text += ("" if "{{-" in part else lead) + str(evaluated(action, dot))
    assert len(blocks) == 1
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def evaluated(action: str, dot: Any) -> Any:
    """The value of an action: a path, or `toYaml` or `add` with a path, then its pipes."""
    first, *pipes = (part.split() for part in action.split("|"))
    function, path, *rest = first if len(first) > 1 else ("", *first)
    value: Any = dot
    for name in path.strip(".").split(".") if path != "." else ():
        value = value[name]
    if function == "toYaml":
        value = yaml.safe_dump(value).rstrip("\n")
    elif function == "add":
        value += int(*rest)
    else:
        assert not function
    for pipe, *args in pipes:
        if pipe == "quote":
            value = json.dumps(str(value))
        else:
            assert pipe == "nindent"
            value = "".join(f"\n{' ' * int(*args)}{line}" for line in value.splitlines())
    return value


def container(objects: Objects) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its only container."""
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    [one] = pod["containers"]
    return pod, one


@pytest.fixture(params=["kubernetes", "chart", "chart with all"])
def objects(request: pytest.FixtureRequest) -> Objects:
    if request.param == "kubernetes":
        return labelled()
    return rendered({} if request.param == "chart" else ALL)


ALL = {
    "devices": {"nvidia.com/gpu": 1},
    "apiKeySecret": "keys",
    "storageClassName": "fast",
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "drainSeconds": 90,
    "podMonitor": True,
}


@pytest.mark.parametrize("is_monitored", [False, True])
def test_the_chart_says_the_same(is_monitored: bool) -> None:
    chart = rendered({"podMonitor": True} if is_monitored else {})
    told = labelled(MONITORED if is_monitored else KUSTOMIZATION)
    assert ("PodMonitor" in chart) == is_monitored, "only where its CRD is known to be installed"
    flags = [container(objects)[1].pop("args") for objects in (chart, told)]
    parsed = [full_parser().parse_args(one) for one in flags]
    assert vars(parsed[0]) == vars(parsed[1])
    assert chart == told


def test_values_are_rendered() -> None:
    objects = rendered(ALL)
    pod, one = container(objects)
    assert pod["nodeSelector"] == ALL["nodeSelector"]
    assert pod["tolerations"] == ALL["tolerations"]
    assert one["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert objects["PersistentVolumeClaim"]["spec"]["storageClassName"] == "fast"
    file = one["args"][one["args"].index("--api-key-file") + 1]
    [mount] = [one for one in one["volumeMounts"] if one["name"] == "keys"]
    assert Path(file).parent == Path(mount["mountPath"])
    assert "--itl-slo" not in container(rendered({"flags": []}))[1]["args"]


def test_it_serves_and_drains_in_time(objects: Objects, tmp_path: Path) -> None:
    pod, one = container(objects)
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    args = [str(keys) if a == "/etc/legato/api-keys" else a for a in one["args"]]
    parsed = full_parser().parse_args(args)
    server, engine = server_config(parsed), engine_config(parsed)
    assert server.host == "0.0.0.0"
    assert [port["containerPort"] for port in one["ports"]] == [server.port]
    assert server.timeout_drain_s is not None
    assert pod["terminationGracePeriodSeconds"] == server.timeout_drain_s + _MARGIN_S
    assert one["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(_HOOK_S)]
    assert _HOOK_S < _MARGIN_S
    assert engine.model.num_threads is not None
    assert engine.model.num_threads < int(one["resources"]["limits"]["cpu"])


def test_its_probes_mean_three_things(objects: Objects) -> None:
    _, one = container(objects)
    probes = {name: one[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = [probe["httpGet"]["path"] for probe in probes.values()]
    assert paths == ["/startupz", "/readyz", "/livez"]
    assert set(paths) <= OPEN_PATHS
    times = {
        name: (probe["periodSeconds"], probe.get("failureThreshold"))
        for name, probe in probes.items()
    }
    assert times == {"startup": (5, 120), "readiness": (2, None), "liveness": (10, 3)}


def test_it_may_do_nothing_that_it_need_not(objects: Objects) -> None:
    pod, one = container(objects)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
    allowed = one["securityContext"]
    assert allowed["readOnlyRootFilesystem"]
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert not allowed["allowPrivilegeEscalation"]
    resources = one["resources"]
    assert resources["requests"] == resources["limits"], "cores of its own, by the static manager"
    assert int(resources["limits"]["cpu"]) == float(resources["limits"]["cpu"])
    mounted = {mount["name"] for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_knows_all_fields(objects: Objects) -> None:
    """But the Prometheus operator's own, which are in no package."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for kind, one in objects.items():
        if kind != "PodMonitor":
            validate(one, "1.30", strict=True)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("kubectl", ("kustomize", DEPLOY / "kubernetes"), labelled),
        ("helm", ("template", "legato", CHART), lambda: rendered({})),
    ],
)
def test_their_own_programs_make_the_same(program: str, arguments: Any, expected: Any) -> None:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program} on this machine")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True)
    assert {one["kind"]: one for one in yaml.safe_load_all(done.stdout)} == expected()
