"""The lock fits pyproject.toml, has a hash for everything, and names no place to get it from; what
releases are made of, images too; the compiler that CXX names."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightserve
from tools import release

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
LOCKS = sorted(FOLDER.glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")
AUDIT = runpy.run_path(str(FOLDER / "audit.py"))


def locked(lock: str) -> list[Requirement]:
    """Return what a lock pins, without the hashes."""
    text = (FOLDER / lock).read_text().replace("\\\n", " ")
    return [Requirement(line.split(" --hash")[0]) for line in text.splitlines() if line]


def not_locked() -> set[str]:
    lines = (FOLDER / "not_locked.in").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def wanted_by_clients() -> list[str]:
    script = runpy.run_path(str(FOLDER / "clients.py"))
    text = (ROOT / "pyproject.toml").read_text()
    wanted: list[str] = script["requirements"](text, ["bench", "chat", "plots"])
    return wanted


def lines_of(file: str) -> list[str]:
    return [x for x in (FOLDER / file).read_text().splitlines() if not x.startswith("#")]


EXTRAS = PROJECT["optional-dependencies"]
OF_SERVER = PROJECT["dependencies"] + lines_of("build.in") + lines_of("beside_torch.in")
WANTED = {
    "serve.txt": OF_SERVER + EXTRAS["postgres"],  # small, and images are for many servers too
    "test.txt": OF_SERVER + EXTRAS["test"],
    "clients.txt": wanted_by_clients() + lines_of("build.in"),
    "triton.txt": lines_of("triton.in"),
    "triton_oldest.txt": lines_of("triton_oldest.in"),
    "supply.txt": lines_of("supply.in") + lines_of("build.in"),
}


@pytest.mark.parametrize("lock", WANTED)
def test_a_lock_has_a_version_of_everything_that_is_asked_for(lock: str) -> None:
    assert {path.name for path in LOCKS} == set(WANTED)
    pins = locked(lock)
    for python in PYTHONS:
        environment = {"python_full_version": python, "python_version": python[:4]}
        environment |= {"sys_platform": "linux", "platform_machine": "x86_64"}
        versions = {
            canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
            for pin in pins
            if pin.marker is None or pin.marker.evaluate(environment)
        }
        for line in WANTED[lock]:
            wanted = Requirement(line)
            if wanted.name in not_locked() and not lock.startswith("triton"):
                assert wanted.name not in versions
                continue
            version = versions.get(canonicalize_name(wanted.name), "missing")
            assert version != "missing" and wanted.specifier.contains(version), (
                f"{lock}: {line} is {version} for Python {python}: `make lock`"
            )


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_each_line_is_a_version_or_a_hash(path: Path) -> None:
    pins = path.read_text().replace("\\\n", " ").splitlines()
    assert pins
    for pin in pins:
        name, *hashes = pin.split(" --hash=")
        assert re.fullmatch(r"[a-z0-9-]+==[^ ]+( ; .*)?", name.strip()), name
        assert hashes, f"{name} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value.strip()) for value in hashes)
    assert "://" not in path.read_text()


def test_what_all_installs_share_is_one_version() -> None:
    of_test = {(pin.name, str(pin.marker)): pin.specifier for pin in locked("test.txt")}
    for lock in ("serve.txt", "clients.txt"):
        for pin in locked(lock):
            assert of_test.get((pin.name, str(pin.marker)), pin.specifier) == pin.specifier


# ------------------------------------------------------------------ the audit

PACKAGES = {"jinja2": "3.1.6", "torch": "2.13.0"}
CLEAN = [{"name": name, "version": version, "vulns": []} for name, version in PACKAGES.items()]
BAD = {"name": "jinja2", "version": "3.1.6", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1.7"]}]}
SKIPPED = {"name": "torch", "skip_reason": "not found"}


def report(*entries: dict[str, Any]) -> str:
    return json.dumps({"dependencies": entries})


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (report(*CLEAN), 0, "audited: 2 packages, no known vulnerability"),
        (report(BAD, CLEAN[1]), 1, "jinja2 3.1.6: CVE-1, fixed in 3.1.7"),
        (report(BAD, SKIPPED), 1, "jinja2 3.1.6: CVE-1, fixed in 3.1.7"),
        (report(CLEAN[0], SKIPPED), 3, "NOT AUDITED: 1 of 2 packages were not looked up"),
        # What pip-audit ends well with where its service knows nothing at all.
        (
            report({"name": "jinja2", "skip_reason": "x"}, SKIPPED),
            3,
            "no advisory service answered: nothing is known about any of them",
        ),
        (report(), 3, "NOT AUDITED: 2 of 2 packages were not looked up"),
        ("", 3, "NOT AUDITED: 2 of 2 packages were not looked up"),
        ("no JSON", 3, "NOT AUDITED: 2 of 2 packages were not looked up"),
    ],
)
def test_only_what_was_looked_up_counts_as_audited(text: str, code: int, said: str) -> None:
    given, lines = AUDIT["judge"](PACKAGES, text)
    assert given == code
    assert said in lines


def test_all_that_is_installed_is_looked_up_by_its_public_version(tmp_path: Path) -> None:
    packages = AUDIT["installed"]()
    assert "pytest" in packages and "lightserve" not in packages
    assert "+" not in packages["torch"]
    fake = tmp_path / "pip-audit"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "wanted = open(sys.argv[-1]).read().split()\n"
        "entries = [dict(name=w.split('==')[0], vulns=[]) for w in wanted]\n"
        "print(json.dumps(dict(dependencies=entries)))\n"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(FOLDER / "audit.py"), str(fake)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"audited: {len(packages)} packages, no known vulnerability\n"


def test_the_report_of_a_vulnerability_has_a_private_way_and_a_time() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "private security advisory" in text
    assert re.search(r"\d+ working days", text)


def test_a_service_that_never_answers_holds_up_the_audit_for_a_while_only(tmp_path: Path) -> None:
    fake = tmp_path / "pip-audit"
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(0o755)
    look_up = AUDIT["look_up"]
    look_up.__globals__["LOOK_UP_S"] = 0.1
    text, complaint = look_up({"a": "1"}, [str(fake)])
    assert (text, complaint) == ("", "no answer within 0.1 s")
    assert AUDIT["judge"]({"a": "1"}, text)[0] == AUDIT["NOT_AUDITED"]


# ------------------------------------------------------------------ releases


def _packed(names: list[str], *, time: int, owner: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as packed:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.uid = time, owner, time
            member.mode = 0o664 if name.endswith("a") else 0o775
            member.size = len(name)
            packed.addfile(member, io.BytesIO(name.encode()))
    return data.getvalue()


def test_who_packed_and_when_changes_no_byte() -> None:
    first = release.repacked(_packed(["x/a", "x/b"], time=1, owner="me"), time=7)
    second = release.repacked(_packed(["x/b", "x/a"], time=2, owner="you"), time=7)
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as packed:
        members = packed.getmembers()
        assert [(m.name, m.mtime, m.uname, m.mode) for m in members] == [
            ("x/a", 7, "", 0o644),
            ("x/b", 7, "", 0o755),
        ]
        contents = [packed.extractfile(member) for member in members]
        assert [file.read() for file in contents if file] == [b"x/a", b"x/b"]


def test_the_version_is_said_twice_alike() -> None:
    assert PROJECT["version"] == lightserve.__version__


def test_notes_are_those_of_the_version_or_of_what_is_not_released(tmp_path: Path) -> None:
    changelog = "# C\n\n## [Unreleased]\n\n### Added\n- new\n\n## [0.1.0] - 2026\n- old\n"
    file = tmp_path / "some.whl"
    file.write_bytes(b"x" * 1234)
    text = release.notes(changelog, "0.1.0", [file], {"lightserve:0.1.0-cpu": "1.2 GB"})
    assert "| `lightserve:0.1.0-cpu` | 1.2 GB |" in text
    assert "- old" in text and "- new" not in text and "| `some.whl` | 1,234 | `" in text
    text = release.notes(changelog, "0.2.0", [file], {})
    assert "image" not in text and text.endswith("### Added\n- new\n") and "- old" not in text


def test_a_release_is_of_one_commit_and_goes_into_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "_git", lambda *_: " M setup.py")
    with pytest.raises(SystemExit, match="changes that no commit has"):
        release.main([str(tmp_path)])
    monkeypatch.setattr(release, "_git", lambda *_: "")
    (tmp_path / "old.whl").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        release.main([str(tmp_path)])


FAKE_BUILDER = """#!/bin/sh
echo "$BUILDAH_FORMAT $*" >> "$(dirname "$0")/calls"
if [ "$1" = images ]; then echo "1.2 GB"; elif [ -e "$(dirname "$0")/broken" ]; then exit 1; fi
"""


@pytest.fixture
def image_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "podman"
    program.write_text(FAKE_BUILDER)
    program.chmod(0o755)
    for name in ("IMAGE_BUILDER", "IMAGES", "IMAGE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(release.shutil, "which", partial(shutil.which, path=str(tmp_path)))
    return program


def test_images_are_built_of_the_commit_and_their_sizes_are_told(
    image_builder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGE_ARGS", "--build-arg 'BASE=some base'")
    sizes = release.build_images(tmp_path / "tree")
    assert sizes == {"lightserve:0.1.0-cpu": "1.2 GB", "lightserve:0.1.0-cuda": "1.2 GB"}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4 and all(call.startswith("docker build ") for call in calls[::2])
    commit = release._git("rev-parse", "--short=12", "HEAD")
    for call in calls[::2]:
        assert f"--build-arg=COMMIT={commit} --build-arg=VERSION=0.1.0" in call
        assert "--build-arg BASE=some base --tag lightserve:0.1.0-" in call
    assert "TORCH" not in calls[0] and "SYSTEM_PACKAGES=gcc libc6-dev" in calls[2]
    monkeypatch.setenv("IMAGES", "cpu")
    assert [*release.build_images(tmp_path / "tree")] == ["lightserve:0.1.0-cpu"]


def test_images_that_cannot_be_built_are_told(
    image_builder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit, match="the image cpu was not built"):
        release.build_images(tmp_path)
    monkeypatch.setenv("IMAGES", "cpu tpu")
    with pytest.raises(SystemExit, match="IMAGES may have cpu, cuda; got tpu"):
        release.build_images(tmp_path)
    monkeypatch.delenv("IMAGES")
    image_builder.unlink()
    assert release.build_images(tmp_path) == {}
    assert "no images: there is none of docker, podman, buildah here" in capfd.readouterr().err
    monkeypatch.setenv("IMAGE_BUILDER", "builder-of-mine")
    with pytest.raises(SystemExit, match="there is no builder-of-mine"):
        release.build_images(tmp_path)


def test_arguments_of_images_are_those_of_the_dockerfile() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    assert arguments["VERSION"] == PROJECT["version"]
    assert {"COMMIT", "SOURCE"} | {key for image in release.IMAGES.values() for key in image} <= {
        *arguments
    }


FAKE_COMPILER = """\
import pathlib, sys
assert sys.argv[1:3] == ["c++", "-target"], sys.argv
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("made")
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("target", "complaint"), [("0", ""), ("1", "lightserve: CXX: "), (None, "lightserve: CXX: ")]
)
def test_the_compiler_that_is_named_is_used_with_its_arguments(
    target: str | None, complaint: str, tmp_path: Path
) -> None:
    """One that fails, or is not there, ends the installation; another is not taken."""
    (tmp_path / "zig.py").write_text(FAKE_COMPILER)
    named = f"{sys.executable} {tmp_path}/zig.py c++ -target {target}"
    script = f"import pathlib, setup; setup.build_core(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"CXX": named if target else "no-such-compiler -x"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stderr.startswith(complaint) and bool(done.returncode) is bool(complaint)
    made = tmp_path / "libcore.so"
    assert made.exists() is not bool(complaint)
