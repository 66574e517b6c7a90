"""What a release is made of, the same bytes for the same commit: `make release`.

The wheel has the native core in it, built by Zig's compiler against an old glibc; the sdist builds
the same. Beside them lie the bill of materials of the locked server, the notes from the changelog,
and checksums of all.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28_x86_64"
COMPILER = f"{sys.executable} -m ziglang c++ -target x86_64-linux-gnu.2.28 -g0 -s"
CORE = "lightserve/kernels/cpu/libcore.so"


def main(arguments: list[str]) -> None:
    """Write all files into a folder. Raises SystemExit with one line on what is not right."""
    out = Path(*(arguments or ["dist"])).resolve()
    if _git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("release: there are changes that no commit has")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        sys.exit(f"release: {out} is not empty")
    with TemporaryDirectory() as temporary:
        tree = Path(temporary, "lightserve")
        tree.mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        ).stdout
        subprocess.run(["tar", "--extract", "--directory", str(tree)], input=archive, check=True)
        (tree / "lightserve" / "COMMIT").write_text(_git("rev-parse", "--short=12", "HEAD") + "\n")
        _build(tree, out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    sdist.write_bytes(repacked(sdist.read_bytes(), time=_commit_time()))
    check_wheel(wheel)
    _write_materials(out / "sbom.cdx.json")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    made = sorted([sdist, wheel, out / "sbom.cdx.json"])
    (out / "NOTES.md").write_text(notes(changelog, wheel.name.split("-")[1], made))
    sums = "".join(f"{_digest(path)}  {path.name}\n" for path in sorted(out.iterdir()))
    (out / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _commit_time() -> int:
    return int(_git("log", "-1", "--format=%ct"))


def _build(tree: Path, out: Path) -> None:
    """Build sdist and, from it, wheel, with the packages of this environment alone."""
    os.umask(0o022)
    known = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    fixed = {"CXX": COMPILER, "SOURCE_DATE_EPOCH": str(_commit_time()), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    option = f"-C--build-option=--plat-name={PLATFORM}"
    done = subprocess.run(
        [*command, option, str(tree)],
        env=known | fixed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}release: the build failed")


def repacked(data: bytes, *, time: int) -> bytes:
    """Return a .tar.gz with the same files, of no owner and of one time, in the order of names."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as before,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = time
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    return gzip.compress(packed.getvalue(), mtime=time)


def check_wheel(wheel: Path) -> None:
    """Check that a wheel has the core, which needs no newer system than its name says."""
    if CORE not in zipfile.ZipFile(wheel).namelist():
        sys.exit(f"release: {wheel.name} has no {CORE}")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r'platform tag:\s+"manylinux_2_(\d+)_x86_64"', " ".join(shown.split()))
    if found is None or int(found[1]) > int(PLATFORM.split("_")[2]):
        sys.exit(f"{shown}release: {wheel.name} is not for {PLATFORM}")


def _write_materials(path: Path) -> None:
    """Write what the lock says a server has, but for torch, which is the user's to choose."""
    command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements"]
    command += ["requirements/serve.txt", "--pyproject", "pyproject.toml"]
    command += ["--output-reproducible", "--output-file", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)


def notes(changelog: str, version: str, files: list[Path]) -> str:
    """Return the part of a changelog on a version, or on what is not released, and a table."""
    found = re.findall(r"^## \[(.+?)\].*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    parts: dict[str, str] = dict(found)
    text = (parts.get(version) or parts["Unreleased"]).strip()
    rows = "".join(
        f"| `{path.name}` | {path.stat().st_size:,} | `{_digest(path)}` |\n" for path in files
    )
    table = f"| file | bytes | SHA-256 |\n| --- | --- | --- |\n{rows}"
    return f"# lightserve {version}\n\n{table}\n{text}\n"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
