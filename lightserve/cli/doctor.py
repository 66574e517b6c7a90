"""`lightserve doctor`: what a machine lacks to serve well; facts for bug reports, without secrets.

The text of `lightserve --version` is here as well.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

import lightserve
from lightserve.config import ServeConfig
from lightserve.errors import LightserveError
from lightserve.extras import missing_extra
from lightserve.kernels.cpu.core import CoreMissingError, load_core, sources_hash

_RELEVANT = re.compile(
    r"(LIGHTSERVE|OMP|MKL|OPENBLAS|KMP|GOMP|TORCH|PYTORCH|CUDA|NVIDIA|NCCL|GLOO|TRITON|HF|"
    r"HUGGING_FACE|TOKENIZERS|PYTHON|MALLOC|OPENAI)_?.*|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_LEAST_FREE = 1 << 30
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")

_ASK_TORCH = """\
import json, torch
cuda = torch.cuda
devices = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, cuda.nccl.version())) if cuda.is_available() else None,
    "threads": torch.get_num_threads(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    "gpus": [{
        "name": d.name,
        "memory_bytes": d.total_memory,
        "compute_capability": f"{d.major}.{d.minor}",
    } for d in devices],
}))
"""


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print all facts as one JSON document.")
def command(as_json: bool) -> int:
    """Check this machine, and say what to change; with --json, for bug reports.

    Looks at cores, memory, huge pages, GPU, limits, the port and the places where a server without
    options keeps things. Values of variables that may be secrets are masked. Nothing is sent
    anywhere. Exit code 1: a server without options would not start.
    """
    facts = collect()
    found = [*checks(facts)]
    if not found[0].advice:  # what is tried needs the packages
        found += _tried()
    if as_json:
        rows = [check._asdict() for check in found]
        click.echo(json.dumps({"checks": rows, **facts}, indent=2))
    else:
        click.echo(version_line())
        for check in found:
            state = "ok" if not check.advice else "fails" if check.is_fatal else "note"
            click.echo(f"{state:<6}{check.name:<12}{check.fact}")
            if check.advice:
                click.echo(f"{'':<18}{check.advice}")
        click.echo("\nlightserve doctor --json prints all facts, for a bug report.")
    return 1 if any(check.advice and check.is_fatal for check in found) else 0


def collect() -> dict[str, dict[str, Any]]:
    """Return all facts; nothing in them has bytes that JSON cannot hold."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(ServeConfig)}
    return {
        "versions": versions(),
        "platform": {
            "system": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
            "python": sys.version.replace("\n", " "),
            "executable": sys.executable,
        },
        "cpu": cpu(_read("/proc/cpuinfo")),
        "core": core(),
        "memory": memory(_read("/proc/meminfo")) | _cgroup_limit(),
        "huge_pages": {"transparent": _chosen(_read(_HUGE_PAGES)) or "none"},
        "torch": torch_facts(),
        "gpu_driver": gpu_driver(_read("/proc/driver/nvidia/version")),
        "environment": environment(os.environ),
        "defaults": defaults,
    }


class Check(NamedTuple):
    """A check and its result."""

    name: str
    fact: str
    advice: str = ""
    """Advice; empty: nothing is to be done."""
    is_fatal: bool = False
    """Whether a server without options does not start as it is."""


def checks(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Yield what the facts of `collect` say."""
    declared = _declared()
    missing = [name for name, at in facts["versions"].items() if at == "not installed"]
    needed = [name for name in missing if declared.get(name)]
    yield Check(
        "packages",
        ", ".join(f"{name} is missing" for name in needed) or "all there",
        f"pip install {' '.join(needed)}" if needed else "",
        is_fatal=True,
    )
    yield _check_core(facts["core"])
    cores = facts["cpu"]["usable_cores"]
    few = "a server with one core computes and answers by turns: two or more" if cores < 2 else ""
    yield Check("cores", f"{cores} usable: {facts['cpu']['model']}", few)
    yield _check_memory(facts["memory"])
    pages = facts["huge_pages"]["transparent"]
    small = "for faster decodes: echo madvise > " + _HUGE_PAGES
    yield Check("huge pages", pages, "" if pages in ("madvise", "always") else small)
    yield _check_gpu(facts["torch"], facts["gpu_driver"], facts["versions"])


def _declared() -> dict[str, bool]:
    """Return the packages that lightserve names, and whether it needs them without any extra."""
    try:
        declared = importlib.metadata.requires("lightserve") or ()
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return {}
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in declared]
    found = dict.fromkeys(names, False)
    for name, line in zip(names, declared, strict=True):
        found[name] |= "extra ==" not in line
    return found


def _check_core(found: Mapping[str, Any]) -> Check:
    why = found.get("missing")
    advice = (
        "the CPU engine is slower; with a C++ compiler: pip install --force-reinstall lightserve"
    )
    return Check("native core", why or f"{found['level']}", advice if why else "")


def _check_memory(found: Mapping[str, int]) -> Check:
    available = min(found.get("available_bytes", 0), found.get("cgroup_limit_bytes", sys.maxsize))
    least = "the bundled model needs about 1 GiB: end other programs, or --kv-memory 256MiB"
    return Check("memory", f"{available / 2**30:.1f} GiB", least if available < 2**30 else "")


def _check_gpu(
    torch: Mapping[str, Any], driver: Mapping[str, str], versions: Mapping[str, str]
) -> Check:
    if "error" in torch:
        return Check("torch", torch["error"], "install torch anew", is_fatal=True)
    names = ", ".join(gpu["name"] for gpu in torch["gpus"])
    if names and versions.get("triton", "not installed") == "not installed":
        return Check("GPU", names, str(missing_extra("triton", "gpu")))
    if driver and not names:
        advice = (
            f"install a build of torch for CUDA: {torch['version']} has {torch['cuda'] or 'none'}"
        )
        return Check("GPU", f"driver {driver.get('nvrm', '')}, which torch does not see", advice)
    return Check("GPU", names or "none: the CPU serves")


def _tried() -> Iterator[Check]:
    """Yield what is known by trying: limits, the port, and the places of files."""
    from lightserve.batches.access import location_of  # noqa: PLC0415 - slow
    from lightserve.cost.profile import cache_dir  # noqa: PLC0415
    from lightserve.supervisor.startup import bind_http_port, check_threads  # noqa: PLC0415

    config = ServeConfig()
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], config.max_connections
    low = f"--max-connections {most} needs more: ulimit -n 65536" if 0 <= files < 2 * most else ""
    yield Check("open files", "no limit" if files < 0 else f"at most {files}", low)
    yield _attempt("threads", "enough", lambda: check_threads(config))
    yield _attempt("port", str(config.port), lambda: bind_http_port(config).close())
    places: tuple[tuple[str, str, Callable[[], Path]], ...] = (
        ("batch store", "--batch-store DIR, or XDG_STATE_HOME", lambda: Path(location_of(config))),
        ("cache", "XDG_CACHE_HOME", cache_dir),
    )
    for name, flag, place in places:
        try:
            yield _check_place(name, flag, place())
        except (LightserveError, RuntimeError) as error:  # there is no home
            yield Check(name, "none", f"{error} ({flag} names another place)")


def _attempt(name: str, fact: str, attempt: Callable[[], None]) -> Check:
    """Try what a start does."""
    try:
        attempt()
    except LightserveError as error:
        return Check(name, "cannot be had", str(error), is_fatal=True)
    return Check(name, fact)


def _check_place(name: str, flag: str, place: Path) -> Check:
    """Look at a directory, or at the one that it would be made in."""
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, f"{there} cannot be written", f"{flag} names another place")
    free = shutil.disk_usage(there).free
    little = "little is free" if free < _LEAST_FREE else ""
    return Check(name, f"{place}, {free / 2**30:.1f} GiB free", little)


def version_line() -> str:
    """Return the version, the commit, and the native core with the instructions that it uses."""
    found = core()
    its = found["missing"] if "missing" in found else f"{found['sources']} with {found['level']}"
    return f"lightserve {lightserve.__version__} (commit {_commit()}; native core: {its})"


def core() -> dict[str, str]:
    """Return what is known of the native core."""
    try:
        return {"level": load_core().level.name, "sources": sources_hash()}
    except CoreMissingError as error:
        return {"missing": str(error)}


def _commit() -> str:
    """Return what the package was built from, or the checkout that it lies in."""
    package = Path(lightserve.__file__).parent
    if noted := _read(str(package / "COMMIT")).strip():
        return noted
    if not (package.parent / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(package.parent), "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        done = subprocess.run(
            [*git, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of lightserve and of what it declares to need, where installed."""
    found = {"lightserve": lightserve.__version__}
    for name in _declared():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu(cpuinfo: str) -> dict[str, Any]:
    """Return what /proc/cpuinfo says, and how many cores this process may use."""
    fields = dict(re.findall(r"^(\S[^:\t]*?)\s*: (.*)$", cpuinfo, re.MULTILINE))
    flags = set(fields.get("flags", "").split())
    return {
        "model": fields.get("model name", platform.processor() or "unknown"),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in _CPU_FLAGS if flag in flags],
    }


def memory(meminfo: str) -> dict[str, int]:
    """Return bytes from /proc/meminfo, which counts in units of 1024."""
    names = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)
    return {names[name]: int(kib) * 1024 for name, kib in rows if name in names}


def gpu_driver(version: str) -> dict[str, str]:
    """Return what /proc/driver/nvidia/version says; nothing without such a driver."""
    rows = re.findall(r"^(\w+) version:\s+(.*)$", version, re.MULTILINE)
    return {name.lower(): " ".join(value.split()) for name, value in rows}


def _cgroup_limit() -> dict[str, int]:
    text = _read("/sys/fs/cgroup/memory.max").strip()
    return {"cgroup_limit_bytes": int(text)} if text.isdecimal() else {}


def torch_facts(command: tuple[str, ...] = (sys.executable, "-c", _ASK_TORCH)) -> dict[str, Any]:
    """Return torch's view of the machine, asked in a process of its own: it is slow to import,
    may fail in ways of its own, and has no place in this one."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        facts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        return {"error": last[0][:500]}
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return facts


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter here; secrets and passwords in URLs are masked."""
    return {
        name: "***" if _SECRET.search(name) else _USER_IN_URL.sub("***", value)
        for name, value in sorted(variables.items())
        if _RELEVANT.fullmatch(name)
    }


def _chosen(text: str) -> str:
    """Return the word in brackets of a file in which the kernel lists choices."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
