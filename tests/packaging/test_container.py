"""The Dockerfiles: in step with the package, and safe by default. Nothing is built here."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.cli.serve import KEY_VARIABLE, serve
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.user_cache import ROOT_VARIABLE

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def last_stage(path: Path) -> dict[str, str]:
    """What the image is made of in the end: the last value of each instruction."""
    stage: dict[str, str] = {}
    for word, rest in instructions(path):
        stage = {} if word == "FROM" else stage
        stage[word] = f"{stage[word]} {rest}" if word in ("RUN", "ENV", "COPY") and word in stage else rest
    return stage


@each
def test_the_last_stage_runs_as_a_numbered_user_and_stops_by_a_signal(path: Path) -> None:
    stage = last_stage(path)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage["USER"])
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert stage["ENTRYPOINT"].startswith("["), "a shell in between would swallow the signal"
    assert json.loads(stage["VOLUME"]) == ["/cache"]
    assert f"{ROOT_VARIABLE}=/cache" in stage["ENV"]
    assert "pip" not in stage["RUN"]
    assert "apt" not in stage["RUN"]


@each
def test_the_entry_point_is_a_command_that_exists_and_does_not_start_without_a_key(path: Path) -> None:
    stage = last_stage(path)
    program, command, *arguments = json.loads(stage["ENTRYPOINT"])
    assert program in PROJECT["scripts"]
    assert command == "serve"
    with click.Context(serve) as context:
        serve.parse_args(context, [*arguments, "--model-name", "demo", "--max-num-seqs", "8"])
    assert (context.params["bundle"], context.params["host"]) == ((Path("/bundle"),), "0.0.0.0")
    assert str(context.params["port"]) == stage["EXPOSE"]
    health = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    assert health[:2] == ["python", "-c"]
    compile(health[2], "HEALTHCHECK", "exec")
    assert "'/health'" in health[2]
    assert stage["EXPOSE"] in health[2]
    ended = CliRunner(env={KEY_VARIABLE: None}).invoke(runtime_cli, [command, *arguments])
    assert (ended.exit_code, "no API key" in ended.stderr) == (2, True)


@each
def test_no_secret_and_nothing_from_outside(path: Path) -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions(path) if word == "ARG")
    assert re.match(r"python:3\.\d+\.\d+-slim-\w+@", arguments["BASE_IMAGE"]), "a tag that stays what it is"
    assert all(rest.startswith("${BASE_IMAGE}") for word, rest in instructions(path) if word == "FROM")
    text = path.read_text()
    assert not re.search(r"https?://|ADD |--index-url|curl|wget|git ", text)
    assert not re.search(r"(ARG|ENV)[^\n]*(KEY|TOKEN|PASSWORD|SECRET)", text)


def test_only_what_the_wheel_needs_reaches_the_build() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    for path in DOCKERFILES:
        sources = [rest.split() for word, rest in instructions(path) if word == "COPY" and "--from" not in rest]
        copied = {name for parts in sources for name in parts[:-1]}
        assert copied == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_compose_gives_the_drain_its_time() -> None:
    service: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["specexport"]
    assert float(service["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_timeout_s
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "?" in service["environment"][KEY_VARIABLE], "no key, no start"
    assert any(volume.endswith(":/bundle:ro") for volume in service["volumes"])
    with click.Context(serve) as context:
        serve.parse_args(context, ["/bundle", *service["command"]])


def test_kubernetes_gives_the_drain_its_time() -> None:
    deployment, _ = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    with click.Context(serve) as context:
        serve.parse_args(context, ["/bundle", *container["args"]])
    (pause,) = re.findall(r"sleep\((\d+)\)", str(container["lifecycle"]["preStop"]))
    assert pod["terminationGracePeriodSeconds"] > context.params["drain_timeout_s"] + float(pause)
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"{pod['securityContext']['runAsUser']}:" in last_stage(DOCKERFILES[0])["USER"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert not pod["automountServiceAccountToken"]
    assert "valueFrom" in next(item for item in container["env"] if item["name"] == KEY_VARIABLE)
