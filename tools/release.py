"""What a release is made of, the same bytes for the same commit: `make release`.

The wheel has the native core in it, built by Zig's compiler against an old glibc; the sdist builds
the same. Beside them lie the bill of materials of the locked server, the notes from the changelog,
and checksums of all.

Images, for CPUs and for CUDA, are built from the same files by docker, podman or buildah
(`IMAGE_BUILDER` names one), and stay in its storage; the notes have their sizes. `IMAGES` says
which ("cpu cuda" unless given), `IMAGE_ARGS` has further arguments of the build, such as another
base or mirror.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28_x86_64"
COMPILER = f"{sys.executable} -m ziglang c++ -target x86_64-linux-gnu.2.28 -g0 -s"
CORE = "lightserve/kernels/cpu/libcore.so"
BUILDERS = ("docker", "podman", "buildah")
IMAGES: dict[str, dict[str, str]] = {
    "cpu": {},
    # PyPI's builds of torch for Linux are those for CUDA; Triton needs a C compiler.
    "cuda": {"TORCH": "torch==2.11.0", "TORCH_INDEX_URL": "", "SYSTEM_PACKAGES": "gcc libc6-dev"},
}
"""By name: build arguments of docker/Dockerfile."""


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
        images = build_images(tree)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    sdist.write_bytes(repacked(sdist.read_bytes(), time=_commit_time()))
    check_wheel(wheel)
    _write_materials(out / "sbom.cdx.json")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    made = sorted([sdist, wheel, out / "sbom.cdx.json"])
    (out / "NOTES.md").write_text(notes(changelog, version(), made, images))
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


def version() -> str:
    """Return the version that is released."""
    text = (ROOT / "pyproject.toml").read_text()
    found: str = tomllib.loads(text)["project"]["version"]
    return found


def builder() -> str | None:
    """Return the program that builds images; None without one.

    Raises:
        SystemExit: there is no such program as IMAGE_BUILDER names.
    """
    if named := os.environ.get("IMAGE_BUILDER"):
        return shutil.which(named) or sys.exit(f"release: there is no {named} (IMAGE_BUILDER)")
    return next(filter(None, map(shutil.which, BUILDERS)), None)


def image_command(program: str, name: str, tree: Path) -> list[str]:
    """Return the command that builds an image from a tree; its tag is the last but one."""
    known = {"COMMIT": _git("rev-parse", "--short=12", "HEAD"), "VERSION": version()}
    known |= {"SOURCE": _source()} | IMAGES[name]
    given = [f"--build-arg={key}={value}" for key, value in known.items()]
    given += shlex.split(os.environ.get("IMAGE_ARGS", ""))
    file, tag = tree / "docker" / "Dockerfile", f"lightserve:{version()}-{name}"
    return [program, "build", f"--file={file}", *given, "--tag", tag, str(tree)]


def _source() -> str:
    """Return the address of the repository, without a login; "unknown" if it is not on the web."""
    url = _git("config", "--get", "--default=", "remote.origin.url")
    found = re.fullmatch(r"https://(?:[^@/]*@)?(\S+)", url)
    return "unknown" if found is None else f"https://{found[1]}"


def build_images(tree: Path) -> dict[str, str]:
    """Build the images that IMAGES names, and return their sizes by tag; none without a builder."""
    wanted = os.environ.get("IMAGES", " ".join(IMAGES)).split()
    if unknown := {*wanted} - {*IMAGES}:
        sys.exit(f"release: IMAGES may have {', '.join(IMAGES)}; got {', '.join(unknown)}")
    program = builder() if wanted else None
    if program is None:
        why = f"there is none of {', '.join(BUILDERS)} here" if wanted else "IMAGES is empty"
        print(f"release: no images: {why}", file=sys.stderr)
        return {}
    sizes = {}
    for name in wanted:
        command = image_command(program, name, tree)
        # Otherwise podman and buildah leave the health check out.
        known = os.environ | {"BUILDAH_FORMAT": "docker"}
        if subprocess.run(command, env=known, stdout=sys.stderr, check=False).returncode:
            sys.exit(f"release: the image {name} was not built (IMAGES says which ones are)")
        listing = [program, "images", "--format", "{{.Size}}", command[-2]]
        done = subprocess.run(listing, capture_output=True, text=True, check=True)
        sizes[command[-2]] = done.stdout.strip()
    return sizes


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


def notes(changelog: str, version: str, files: list[Path], images: dict[str, str]) -> str:
    """Return the part of a changelog on a version, or on what is not released, and tables.

    `images` are sizes by tag.
    """
    found = re.findall(r"^## \[(.+?)\].*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    parts: dict[str, str] = dict(found)
    text = (parts.get(version) or parts["Unreleased"]).strip()
    rows = "".join(
        f"| `{path.name}` | {path.stat().st_size:,} | `{_digest(path)}` |\n" for path in files
    )
    table = f"| file | bytes | SHA-256 |\n| --- | --- | --- |\n{rows}"
    if images:
        rows = "".join(f"| `{tag}` | {size} |\n" for tag, size in images.items())
        table += f"\n| image | size |\n| --- | --- |\n{rows}"
    return f"# lightserve {version}\n\n{table}\n{text}\n"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
