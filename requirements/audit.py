"""Look up known vulnerabilities of everything that this Python has installed: `make audit`.

    python requirements/audit.py PATH_OF_PIP_AUDIT [further options of pip-audit]

pip-audit says "no known vulnerabilities" and ends with 0 even when its service knew not one of the
packages, as where it cannot be reached through a mirror. So what was looked up is counted here.
Exit codes: 0, everything was looked up and nothing is known; 1, something is known; 3, NOT AUDITED:
some package, or all of them, could not be looked up.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

OWN = "lightserve"
CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 3
LOOK_UP_S = 300
"""A service that neither answers nor refuses holds nothing up for longer."""


def installed() -> dict[str, str]:
    """Return the versions of all packages but this project's, by normalised name.

    A local part ("+cpu") names a build: advisories know the version before it.
    """
    found = {
        re.sub(r"[-_.]+", "-", item.name).lower(): item.version.partition("+")[0]
        for item in importlib.metadata.distributions()
    }
    found.pop(OWN, None)
    return dict(sorted(found.items()))


def look_up(packages: Mapping[str, str], command: Sequence[str]) -> tuple[str, str]:
    """Return what pip-audit prints as JSON, and what it complains of."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in packages.items()))
        file.flush()
        options = ["--disable-pip", "--no-deps", "--format=json", "--progress-spinner=off"]
        try:
            done = subprocess.run(
                [*command, *options, "--requirement", file.name],
                capture_output=True,
                text=True,
                check=False,
                timeout=LOOK_UP_S,
            )
        except subprocess.TimeoutExpired:
            return "", f"no answer within {LOOK_UP_S} s"
    return done.stdout, done.stderr


def judge(packages: Mapping[str, str], report: str) -> tuple[int, list[str]]:
    """Return the exit code, and what to say, from pip-audit's JSON (empty if it had none)."""
    try:
        entries: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        entries = []
    looked_up = {entry["name"]: entry["vulns"] for entry in entries if "vulns" in entry}
    lines = [
        f"{name} {packages.get(name, '?')}: {vulnerability['id']}, fixed in"
        f" {', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for name, vulnerabilities in looked_up.items()
        for vulnerability in vulnerabilities
    ]
    missing = [name for name in packages if name not in looked_up]
    if missing:
        lines.append(f"NOT AUDITED: {len(missing)} of {len(packages)} packages were not looked up")
        if len(missing) < len(packages):
            lines.append("not looked up: " + " ".join(missing))
        else:
            lines.append("no advisory service answered: nothing is known about any of them")
    if lines and looked_up and any(looked_up.values()):
        return VULNERABLE, lines
    if missing:
        return NOT_AUDITED, lines
    return CLEAN, [f"audited: {len(packages)} packages, no known vulnerability"]


def main() -> int:
    """Print the verdict; return the exit code."""
    packages = installed()
    report, complaints = look_up(packages, sys.argv[1:])
    code, lines = judge(packages, report)
    if code == NOT_AUDITED and not report:
        lines += [f"pip-audit: {line}" for line in complaints.strip().splitlines()[-1:]]
    print("\n".join(lines), file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
