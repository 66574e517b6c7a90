"""Programs as documented commands call them.

`lightserve` and `make` are the real ones, on free ports, ending by themselves.

`lightserve serve` ends, in order, as soon as it is ready; with LIGHTSERVE_ONLY_CHECK it only looks
at its options. Clients that are told of no server take the one of the test. `make` takes what would
be installed for installed; with LIGHTSERVE_ONLY_CHECK it only says what it would do.

`docker`, `kubectl` and `pip` do nothing: what they are told is held to the compose file, the
manifests and pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_STAMPS = (".venv/.has-serve", ".venv/.has-test", ".venv-clients/.has-clients")


def lightserve(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("bench", "chat") and "--url" not in arguments:
        arguments = [*arguments, "--url", os.environ["LIGHTSERVE_URL"]]
    command = [sys.executable, "-m", "lightserve", *arguments]
    if arguments[:1] != ["serve"] or "--help" in arguments:
        return subprocess.call(command)
    if os.environ.get("LIGHTSERVE_ONLY_CHECK"):
        return _check_options(arguments)
    with tempfile.TemporaryDirectory(prefix="ls-") as run_dir:
        more = ("--port=0", "--metrics-port=0", "--num-threads=1", "--profile=off")
        server = subprocess.Popen(
            [*command, *more, f"--run-dir={run_dir}"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        is_ready = any("lightserve: ready on" in line for line in server.stdout)
        server.send_signal(signal.SIGTERM)
        server.stdout.read()
        return server.wait() or not is_ready


def _check_options(arguments: list[str]) -> int:
    """Do all that comes before processes are started."""
    from lightserve.cli.main import main
    from lightserve.supervisor import loop

    checked = []

    def note(*_values: object, **_more: object) -> int:
        checked.append(True)
        return 0

    loop.serve = note
    sys.argv = ["lightserve", *arguments]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    return 0 if code in (0, None) and checked else 1


_ONLY_CHECKED = {"check", "test", "test-long", "fmt", "bench", "gpu-check", "gpu-wheels"}


def make(arguments: list[str]) -> int:
    flags = [flag for stamp in _STAMPS for flag in ("-o", stamp)]
    if _ONLY_CHECKED & {*arguments} or any("TORCH=" in word for word in arguments):
        flags.append("-n")
    return subprocess.call(["/usr/bin/make", *flags, *arguments])


def docker(arguments: list[str]) -> int:
    """Files, profiles and services must be there, and a service in the profile that is named."""
    import yaml

    options = argparse.ArgumentParser()
    kinds = options.add_subparsers(dest="kind", required=True)
    build = kinds.add_parser("build")
    build.add_argument("-f", type=Path)
    build.add_argument("-t")
    build.add_argument("context", type=Path)
    run = kinds.add_parser("run")
    run.add_argument("--rm", action="store_true")
    run.add_argument("--read-only", action="store_true")
    for flag in ("-p", "--cap-drop", "--security-opt", "--pids-limit", "--memory", "--tmpfs"):
        run.add_argument(flag)
    run.add_argument("-v", action="append")
    run.add_argument("image")
    compose = kinds.add_parser("compose")
    compose.add_argument("--profile")
    actions = compose.add_subparsers(dest="action", required=True)
    for name, flags in _COMPOSE.items():
        action = actions.add_parser(name)
        for flag in flags:
            action.add_argument(flag, action="store_true")
        action.add_argument("service", nargs="?")
        action.add_argument("rest", nargs=argparse.REMAINDER)
    given = options.parse_args(arguments)
    if given.kind == "build":
        return not (given.f.is_file() and given.context.is_dir())
    file = Path("docker-compose.yml")
    if not file.is_file():  # a block that goes on where another did `cd docker`
        file = "docker" / file
    services = yaml.safe_load(file.read_text())["services"]
    if given.kind == "run":
        return _hardened_as(services["server"], given)
    profile = [] if given.profile is None else [given.profile]
    if given.profile and not any(given.profile in s.get("profiles", ()) for s in services.values()):
        return _refuse(f"no profile {given.profile}")
    if given.service is None:
        return 0
    if given.service not in services:
        return _refuse(f"no service {given.service}")
    of_service = services[given.service].get("profiles", [])
    return 0 if not of_service or {*profile} & {*of_service} else _refuse("not in the profile")


def _hardened_as(service: dict[str, object], given: argparse.Namespace) -> int:
    """A container that is run by hand has the limits of the one that the compose file runs."""
    limits = ("image", "read_only", "cap_drop", "security_opt", "pids_limit", "mem_limit", "tmpfs")
    for limit in limits:
        value, name = service[limit], "memory" if limit == "mem_limit" else limit
        text = str(value[0] if isinstance(value, list) else value)
        wanted = re.sub(r"\$\{\w+:-(.*)\}", r"\1", text)
        if str(getattr(given, name)) != wanted:
            return _refuse(f"{limit}: {getattr(given, name)}, in the compose file {wanted}")
    return 0


_COMPOSE = {
    "up": ("--build", "--wait"),
    "run": ("--build", "--rm"),
    "down": ("--volumes",),
    "restart": (),
}


def prometheus(arguments: list[str]) -> int:
    """The real one, until it says that it is ready."""
    real = next(p for p in map(Path, os.get_exec_path()[1:]) if (p / "prometheus").is_file())
    with tempfile.TemporaryDirectory(prefix="prom-") as data:
        more = (f"--storage.tsdb.path={data}", "--web.listen-address=127.0.0.1:0")
        server = subprocess.Popen(
            [real / "prometheus", *arguments, *more], stderr=subprocess.PIPE, text=True
        )
        assert server.stderr is not None
        is_ready = any("ready to receive web requests" in line for line in server.stderr)
        server.terminate()
        server.stderr.read()
        return server.wait() or not is_ready


def kubectl(arguments: list[str]) -> int:
    """Files that are named must be there, and so must deployments."""
    import yaml

    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        file = after if word == "-f" else word.partition("=")[2].partition("=")[2]
        if (word == "-f" or word.startswith("--from-file=")) and not Path(file).is_file():
            return _refuse(f"no file {file}")
        kind, _, name = word.partition("/")
        if kind == "deployment":
            text = Path("docker/kubernetes/lightserve.yaml").read_text()
            parts = [part for part in yaml.safe_load_all(text) if part["kind"] == "Deployment"]
            if name not in [part["metadata"]["name"] for part in parts]:
                return _refuse(f"no deployment {name}")
    return 0


def pip(arguments: list[str]) -> int:
    """Extras of this project must be there, and files that are named."""
    import tomllib

    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in arguments:
        match = re.fullmatch(r"(?:lightserve|\.)\[(.+)\]", word)
        if match and (absent := {*match[1].split(",")} - {*extras}):
            return _refuse(f"no extra {absent}")
    return 0 if arguments[:1] == ["install"] else _refuse("not known")


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    name = Path(sys.argv[1]).name
    programs = {
        "lightserve": lightserve,
        "make": make,
        "docker": docker,
        "kubectl": kubectl,
        "pip": pip,
        "prometheus": prometheus,
    }
    sys.exit(programs[name](sys.argv[2:]))
