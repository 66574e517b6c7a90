"""The container's files, as far as they can be checked without an engine."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lightserve.cli import serve as cli_serve
from lightserve.config import ServeConfig
from lightserve.supervisor import loop

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = (DOCKER / "docker-compose.yml").read_text()
SERVICES = ("server", "loadtest")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE)
    return loaded


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed (extra test)")
    result = subprocess.run(
        [hadolint, "--no-color", "--failure-threshold", "info", str(DOCKER / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "")


_COMPOSE_MISTAKES = {
    "read_only": "read_onlx",
    "pids_limit: 512": "pids_limit: many",
    "{condition: service_healthy}": "{condition: well}",
}


def test_the_compose_file_follows_the_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    parsed = compose_spec.PyCompose.from_json(_as_an_engine_reads_it(COMPOSE))
    assert {*parsed.service_names()} == {*_services()}
    for right, wrong in _COMPOSE_MISTAKES.items():
        with pytest.raises(ValueError, match=r"services|read_onlx|many|well"):
            compose_spec.PyCompose.from_json(_as_an_engine_reads_it(COMPOSE.replace(right, wrong)))


def test_the_gpu_server_changes_what_a_gpu_needs(compose: dict[str, Any]) -> None:
    server, plain = (_services()[name] for name in ("server-gpu", "server"))
    (gpu,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    # As many GPUs as ranks, whatever their number.
    assert COMPOSE.count("${LIGHTSERVE_TP:-1}") == 2
    # What is hardened stays so; all that is written outlives the container, beside /tmp.
    kept = ("user", "read_only", "cap_drop", "security_opt", "ipc", "tmpfs", "secrets", "volumes")
    for key in (*kept, "healthcheck", "ports"):
        assert server[key] == plain[key]
    args = server["build"]["args"]
    assert set(args) <= set(re.findall(r"^ARG (\w+)", _dockerfile(), re.MULTILINE))
    assert not args["TORCH_INDEX_URL"]


def test_the_gpu_command_is_one_that_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeConfig] = []
    monkeypatch.setattr(loop, "serve", lambda config, **_: served.append(config) or 0)
    for tp in (1, 2):
        command = _command("server-gpu", LIGHTSERVE_TP=str(tp), LIGHTSERVE_FLAGS="--max-num-seqs 5")
        assert command[0] == "serve"
        result = CliRunner().invoke(cli_serve.command, command[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert (served[-1].device, served[-1].tp) == ("cuda", tp)
        assert served[-1].max_num_seqs == 5
        assert served[-1].api_key_file == "/run/secrets/api_keys"


def _command(service: str, **variables: str) -> list[str]:
    """Return a server's command: a string, which an engine splits as a shell does."""
    filled = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: variables.get(m[1], m[2]), COMPOSE)
    return shlex.split(yaml.safe_load(filled)["services"][service]["command"])


def _services() -> dict[str, Any]:
    """Return all services, with defaults in place of variables."""
    services: dict[str, Any] = json.loads(_as_an_engine_reads_it(COMPOSE))["services"]
    return services


def test_every_service_is_hardened_and_mounts_what_there_is() -> None:
    for service, spec in _services().items():
        for mount in spec.get("volumes", []):
            source = mount.partition(":")[0]
            assert not source.startswith("./") or (DOCKER / source).exists(), mount
        assert all(port.startswith("127.0.0.1:") for port in spec.get("ports", [])), service
        uid = int(spec["user"].partition(":")[0])
        assert uid > 0 and spec["read_only"] and spec["cap_drop"] == ["ALL"]
        assert spec["ipc"] == "private" and spec["security_opt"] == ["no-new-privileges:true"]
        assert 0 < spec["pids_limit"] <= 512 and spec["mem_limit"] and spec["logging"]["options"]
        assert all("size=" in mount for mount in spec["tmpfs"])
        for loose in ("privileged", "cap_add", "network_mode", "pid", "devices"):
            assert loose not in spec


PROFILES = {
    "": set[str](),
    "gpu": {"server-gpu"},
    "loadtest": {"loadtest"},
    "monitoring": {"prometheus", "grafana"},
    "replicas": {"replica-1", "replica-2", "replica-3", "nginx", "postgres"},
}


@pytest.mark.parametrize("profile", PROFILES)
def test_an_engine_of_compose_reads_it(profile: str) -> None:
    """With its profiles and defaults; no daemon is needed for that."""
    pytest.importorskip("podman_compose")
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed, which it asks for its version")
    flags = ["--profile", profile] if profile else []
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "podman_compose",
            "-f",
            str(DOCKER / "docker-compose.yml"),
            *flags,
            "config",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == {"server", *PROFILES[profile]}
    for name, spec in services.items():
        assert spec["read_only"] is True and spec["cap_drop"] == ["ALL"], name
        assert "${" not in json.dumps(spec)


def test_replicas_are_servers_with_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeConfig] = []
    monkeypatch.setattr(loop, "serve", lambda config, **_: served.append(config) or 0)
    services = _services()
    behind = re.findall(r"server (replica-\d):8000", (DOCKER / "nginx.conf").read_text())
    assert behind == ["replica-1", "replica-2", "replica-3"]
    for name in behind:
        assert "ports" not in services[name] and services[name]["profiles"] == ["replicas"]
        assert services[name]["secrets"] == ["api_keys"]
        command = shlex.split(services[name]["command"])
        result = CliRunner().invoke(cli_serve.command, command[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert {config.batch_store for config in served} == {
        "postgresql://lightserve@postgres/lightserve"
    }
    assert services["nginx"]["ports"] == ["127.0.0.1:8000:8080"]
    assert "listen 8080;" in (DOCKER / "nginx.conf").read_text()


def test_prometheus_scrapes_the_server_of_the_same_file() -> None:
    config = yaml.safe_load((DOCKER / "monitoring" / "prometheus.compose.yml").read_text())
    alone = yaml.safe_load((DOCKER / "monitoring" / "prometheus.yml").read_text())
    assert config["rule_files"] == alone["rule_files"]
    mounted = {mount.split(":")[1] for mount in _services()["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} < mounted
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert job["authorization"] == {"credentials_file": "/run/secrets/operator_key"}


def _as_an_engine_reads_it(text: str) -> str:
    """The file as JSON, with ${NAME:-default} at its default and the shared mapping merged."""
    return json.dumps(yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)))


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_hardened(compose: dict[str, Any], service: str) -> None:
    spec = compose["services"][service]
    assert spec["user"] == "10001:10001"
    assert spec["read_only"] is True
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]
    assert spec["ipc"] == "private"
    assert 0 < spec["pids_limit"] <= 512
    assert spec["mem_limit"]
    assert any(mount.startswith("/tmp:") and "size=" in mount for mount in spec["tmpfs"])
    for loose in ("privileged", "cap_add", "network_mode", "pid", "devices"):
        assert loose not in spec
    # What lies elsewhere is the cache, the store, and models that cannot be changed.
    writable = [mount for mount in spec.get("volumes", []) if not mount.endswith(":ro")]
    assert writable == (["cache:/cache", "state:/state"] if service == "server" else [])


def test_what_is_learned_and_kept_outlives_a_container(compose: dict[str, Any]) -> None:
    assert {"cache", "state"} < set(compose["volumes"])
    assert "--owner=10001 --group=10001 /cache /state" in _dockerfile()
    assert re.search(r"^ +XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/", _dockerfile(), re.M)
    assert re.search(r" XDG_STATE_HOME=/state$", _dockerfile(), re.M)


def test_the_compose_file_has_the_images_health_check(compose: dict[str, Any]) -> None:
    check = compose["services"]["server"]["healthcheck"]
    found = re.search(r"^HEALTHCHECK (.*) \\\n +CMD (\[.*\])$", _dockerfile(), re.MULTILINE)
    assert found is not None
    assert check["test"] == ["CMD", *json.loads(found[2])]
    of_image = dict(word.removeprefix("--").split("=") for word in found[1].split())
    assert {key.replace("_", "-"): str(value) for key, value in check.items()} == {
        **of_image,
        "test": str(check["test"]),
    }


def test_the_server_is_private_to_its_container(compose: dict[str, Any]) -> None:
    server = compose["services"]["server"]
    assert server["shm_size"]
    assert server["ports"]
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    assert server["restart"] == "unless-stopped"
    grace_s = int(server["stop_grace_period"].removesuffix("s"))
    assert grace_s > ServeConfig().shutdown_timeout_s


def test_the_load_client_waits_for_a_healthy_server(compose: dict[str, Any]) -> None:
    client = compose["services"]["loadtest"]
    assert client["profiles"] == ["loadtest"]
    assert client["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert "profiles" not in compose["services"]["server"]


def test_keys_are_secret_files_and_nothing_else(compose: dict[str, Any]) -> None:
    for service, secret in (("server", "api_keys"), ("loadtest", "loadtest_key")):
        spec = compose["services"][service]
        assert spec["secrets"] == [secret]
        assert f"--api-key-file=/run/secrets/{secret}" in spec["command"]
        assert "environment" not in spec
        assert set(compose["secrets"][secret]) == {"file"}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "docker/secrets/" in ignored


def test_both_commands_are_ones_that_the_server_takes(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServeConfig] = []
    monkeypatch.setattr(loop, "serve", lambda config, **_: served.append(config) or 0)
    of_image = re.search(r"^CMD (\[\"serve\".*\])$", _dockerfile(), re.MULTILINE)
    assert of_image is not None
    more = _command("server", LIGHTSERVE_FLAGS="--max-num-seqs 5 --policy 'priority'")
    for command in (_command("server"), yaml.safe_load(of_image[1]), more):
        assert command[0] == "serve"
        result = CliRunner().invoke(cli_serve.command, command[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert served[0] == served[1]
    assert (served[2].max_num_seqs, served[2].policy) == (5, "priority")
    assert served[0].host == "0.0.0.0"
    assert served[0].api_key_file == "/run/secrets/api_keys"


def test_the_load_clients_options_exist(compose: dict[str, Any]) -> None:
    options = [word.split("=")[0] for word in compose["services"]["loadtest"]["command"]]
    shown = subprocess.run(
        [sys.executable, "-m", "lightserve", "bench", "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout
    assert [option for option in options if f"  {option} " not in shown] == []


def test_stages_end_as_an_unprivileged_user_with_a_health_check() -> None:
    stages = re.split(r"^FROM ", _dockerfile(), flags=re.MULTILINE)[1:]
    assert all(stage.startswith("${BASE} AS ") for stage in stages)
    for stage in stages:
        if "ENTRYPOINT" in stage:
            assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["10001:10001"]
            assert "pip install" not in stage
            assert "RUN " not in stage[stage.index("\nUSER ") :]
    assert "HEALTHCHECK" in stages[-1]
    assert "COPY docker/healthcheck.py" in stages[-1]


def _dockerfile() -> str:
    return (DOCKER / "Dockerfile").read_text()


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_asks_readyz(status: int | None, expected: int) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert status is not None
            self.send_response(status if self.path == "/readyz" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_port
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.handle_request, daemon=True).start()
        result = subprocess.run(
            [sys.executable, "-I", str(DOCKER / "healthcheck.py")],
            env={**os.environ, "LIGHTSERVE_READY_URL": f"http://127.0.0.1:{port}/readyz"},
            timeout=600,
            check=False,
            capture_output=True,
        )
    assert result.returncode == expected


def test_the_load_clients_requirements_are_the_projects() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "requirements" / "clients.py"), str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]["bench"]) < set(printed)
    assert not [line for line in printed if line.startswith("torch")]
    names = {re.split(r"[^a-z_]", line)[0] for line in printed}
    assert {"click", "msgspec", "numpy", "aiohttp"} <= names
