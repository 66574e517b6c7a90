"""`lightserve collect-env`: what a bug report needs to know of a machine, without its secrets."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

import lightserve
from lightserve.config import ServeConfig

_RELEVANT = re.compile(
    r"(LIGHTSERVE|OMP|MKL|OPENBLAS|KMP|GOMP|TORCH|PYTORCH|CUDA|NVIDIA|NCCL|GLOO|TRITON|HF|"
    r"HUGGING_FACE|TOKENIZERS|PYTHON|MALLOC|OPENAI)_?.*|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
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


@click.command("collect-env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> int:
    """Print versions, machine, environment variables and defaults, for bug reports.

    Values of variables that may be secrets are masked. Nothing is sent anywhere.
    """
    document = collect()
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return 0
    for section, values in document.items():
        click.echo(f"{section}:")
        for name, value in values.items():
            click.echo(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Return all sections; nothing in them has bytes that JSON cannot hold."""
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
        "memory": memory(_read("/proc/meminfo")) | _cgroup_limit(),
        "torch": torch_facts(),
        "gpu_driver": gpu_driver(_read("/proc/driver/nvidia/version")),
        "environment": environment(os.environ),
        "defaults": defaults,
    }


def versions() -> dict[str, str]:
    """Return the versions of lightserve and of what it declares to need, where installed."""
    found = {"lightserve": lightserve.__version__}
    try:
        declared: Iterable[str] = importlib.metadata.requires("lightserve") or ()
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        declared = ()
    for requirement in declared:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
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


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
