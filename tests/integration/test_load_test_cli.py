"""`lightserve bench` as its users run it, against the mock server as a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jsonschema_rs
import pytest

from lightserve.cli.main import main
from lightserve.loadtest import result

MOCK = Path(__file__).parents[1] / "support" / "mock_server.py"
BENCH = [sys.executable, "-m", "lightserve", "bench"]
KEY = "sk-very-secret"


@pytest.fixture(scope="module")
def mock_url() -> Iterator[str]:
    process = subprocess.Popen(
        [
            sys.executable,
            str(MOCK),
            "--ttft-s=0.002",
            "--gap-s=0.001",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def load_test(*args: str, exit_code: int = 0) -> str:
    done = run_bench(*args)
    assert done.returncode == exit_code, done.stderr
    return done.stdout + done.stderr


def run_bench(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: one of its own would import for a second what it needs."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, LOAD_TEST_API_KEY=KEY),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main(["bench", *args])
    code = ended.value.code or 0
    assert isinstance(code, int)
    said = [stream.buffer.getvalue().decode() for stream in (stdout, stderr)]
    return subprocess.CompletedProcess(args, code, *said)


SMALL = ("--num-requests=20", "--prompt-tokens=50", "--output-tokens=4:8", "--warmup=1")


@pytest.fixture(scope="module")
def sweep(mock_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over two rates with both classes; the directory has result.json and plots."""
    directory = tmp_path_factory.mktemp("sweep")
    text = load_test(
        f"--url={mock_url}", "--rates=50,100", *SMALL, "--targets=ttft=20s,mtpot=10s",
        "--be=concurrency=2 prompt-tokens=30 output-tokens=3", "--be-targets=e2el=60s",
        f"--output={directory / 'result.json'}", f"--plots={directory}", "--save-requests",
        "--label=first",
    )  # fmt: skip
    for wanted in ("real time", "best effort", "together", "TTFT", "MTPOT", "first rate=100"):
        assert wanted in text
    assert text.count("┏") == 1, "one table at the end"
    return directory


def test_results_are_as_their_schema_says_and_hold_no_key(sweep: Path) -> None:
    content = (sweep / "result.json").read_text()
    jsonschema_rs.validator_for(json.loads(load_test("--schema"))).validate(json.loads(content))
    assert KEY not in content
    runs = result.load(sweep / "result.json")
    assert [run.traffic[0].rate for run in runs] == [50, 100]
    for run in runs:
        assert run.classes["rt"].num_arrivals == run.classes["rt"].num_met == 20
        assert run.classes["be"].num_arrivals == run.classes["be"].num_met > 0
        assert run.classes["rt"].prompt_lengths.error_p99_pct == pytest.approx(0, abs=4.1)
        assert run.classes["rt"].tokens_are_counted_by == "usage"
        assert len(run.requests) == run.classes["all"].num_arrivals


def test_plots_are_pictures(sweep: Path) -> None:
    names = {path.name for path in sweep.glob("*.png")}
    assert {"cdf.png", "rates.png"} < names and len(names) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in sweep.glob("*.png"))


def test_a_run_ends_with_one_table_and_a_picture_over_time(mock_url: str, tmp_path: Path) -> None:
    picture = tmp_path / "over_time.svg"
    text = load_test(
        f"--url={mock_url}", "--rate=50", *SMALL, f"--plot={picture}", "--targets=ttft=20s",
        "--be=concurrency=2 prompt-tokens=30 output-tokens=3",
    )  # fmt: skip
    assert text.count("┏") == 1 and f"plots: {picture}" in text
    for row in ("arrived", "goodput, requests/s", "TTFT, ms", "ITL, ms", "(≤ 20,000: 100.0 %)"):
        assert row in text, text
    assert picture.read_text().count("</svg>") == 1


def test_pictures_are_sent_and_counted(mock_url: str, tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    nested = "--be=concurrency=2 num-requests=4 prompt-tokens=20 output-tokens=4"
    sizes = ("--images=2:32x24", "--num-requests=6", "--output-tokens=4", "--warmup=0")
    text = load_test(
        "--url", mock_url, "--rate=50", *sizes, nested, "--save-requests", f"--output={output}"
    )
    (row,) = (line for line in text.splitlines() if "images" in line)
    assert [int(part) for part in row.split("│") if part.strip().isdigit()] == [12, 0, 12]
    (run,) = result.load(output)
    assert run.classes["rt"].num_images == 12 and run.classes["be"].num_images == 0
    # Lengths are those of the text: with pictures the server's count says nothing of them.
    assert run.classes["rt"].prompt_lengths.mean is None
    assert run.classes["be"].prompt_lengths.mean is not None


def test_json_is_all_that_is_printed(mock_url: str, tmp_path: Path) -> None:
    picture = tmp_path / "over_time.png"
    done = run_bench(f"--url={mock_url}", "--rate=50", *SMALL, "--json", f"--plot={picture}")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema_rs.validator_for(json.loads(load_test("--schema"))).validate(document)
    (run,) = document["runs"]
    assert run["classes"]["rt"]["num_completed"] == 20
    assert sum(run["timeline"]["goodput_requests_per_s"]["rt"]) * run["timeline"]["bin_s"] == 20
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_said_before_the_run(tmp_path: Path) -> None:
    for name, message in (("x.docx", "must end with"), ("no/x.png", "is no directory")):
        done = run_bench("--url=http://127.0.0.1:1", "--rate=1", f"--plot={tmp_path / name}")
        assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(("module", "words"), [("matplotlib", "--plot=x.png"), ("aiohttp", "")])
def test_a_missing_extra_is_named(module: str, words: str) -> None:
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from lightserve.cli.main import main\n"
        f"main(['bench', '--rate=1', '--url=http://127.0.0.1:1', *{words.split()!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"{module} is missing:" in done.stderr and "pip install" in done.stderr


def test_the_command_imports_no_torch() -> None:
    script = (
        "import sys, lightserve.cli.bench, lightserve.loadtest.session, lightserve.loadtest.plots\n"
        "assert not {'torch', 'transformers', 'zmq'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


def test_files_are_compared(sweep: Path, mock_url: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    quiet = load_test(
        f"--url={mock_url}", "--concurrency=4", *SMALL, f"--output={other}", "--quiet"
    )
    line, saved = quiet.splitlines()
    assert "arrivals/s; rt 20 of 20" in line and "TTFT" in line
    assert saved == f"result: {other}"
    text = load_test("--compare", str(sweep / "result.json"), str(other))
    for wanted in ("result: first rate=50", "other", "goodput, tokens/s", "differ in: traffic"):
        assert wanted in text
    assert "%)" in text
    same = load_test("--compare", str(other), str(other), f"--plots={tmp_path / 'plots'}")
    assert "differ in" not in same and "%)" not in same
    assert (tmp_path / "plots" / "rates.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "when do requests arrive?"),
        (("--rate=1", "--concurrency=2"), "--rate cannot be combined with --concurrency"),
        (("--rate=0",), "--rate"),
        (("--rates=1,x",), "--rates"),
        (("--rate=nan",), "not a finite number"),
        (("--rate=1", "--duration-s=inf"), "not a finite number"),
        (("--rates=1,inf",), "--rates"),
        (("--rates=1", "--rate=2"), "--rates cannot be combined with --rate"),
        (("--arrivals=trace", "--trace=alpaca_lengths"), "has times"),
        (("--rate=1", "--time-scale=2"), "--time-scale"),
        (("--rate=1", "--be=speed=3"), "speed"),
        (("--rate=1", "--images=x"), "--images must be a count"),
        (("--rate=1", "--images=1", "--endpoint=completions"), "--images needs --endpoint chat"),
        (("--rate=1", "--be=concurrency=x"), "concurrency"),
        (("--rate=1", "--body=[]"), "--body"),
        (("--compare", "only.json"), "cannot read"),
        (("--rate=1", "file.json"), "--compare"),
        (("--rate=1", "--api-key-file=/nonexistent"), "--api-key-file"),
    ],
)
def test_wrong_arguments(
    args: tuple[str, ...],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOAD_TEST_API_KEY", KEY)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args, "--url=http://127.0.0.1:1"])
    assert ended.value.code == (1 if "only.json" in args else 2)
    assert message in "".join(capfd.readouterr())


def test_no_server_is_said_in_a_line() -> None:
    text = load_test("--rate=1", "--url=http://127.0.0.1:1", exit_code=1)
    assert "is it up?" in text and "Traceback" not in text


def test_ctrl_c_reports_what_there_is(mock_url: str, tmp_path: Path) -> None:
    output = tmp_path / "cut.json"
    num_before = _num_received(mock_url)
    process = subprocess.Popen(
        [*BENCH, f"--url={mock_url}", "--rate=50",
         "--duration-s=600", "--output-tokens=2", f"--output={output}", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    with process:
        while _num_received(mock_url) < num_before + 20:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=600)[0]
    assert process.returncode == 0, text
    run = result.load(output)[0]
    assert run.was_interrupted and run.classes["rt"].num_completed > 0


def _num_received(url: str) -> int:
    """Requests of runs; probes have no id."""
    with urllib.request.urlopen(f"{url}/log", timeout=300) as answer:
        return sum(name.startswith("load-") for name in json.load(answer))


def test_help_names_every_section() -> None:
    text = load_test("--help")
    for section in ("Server:", "What is sent:", "When it arrives:", "Classes and targets:",
                    "Runs:", "Output:"):  # fmt: skip
        assert section in text


MIXED = (
    *("mixed", "--rate=200", "--duration-s=0.5", "--output-tokens=3", "--prompt-tokens=20"),
    *("--batch=6", "--batch-output-tokens=40", "--batch-prompt-tokens=30", "--warmup=0"),
)


def test_chats_beside_a_batch_in_every_scene(mock_url: str, tmp_path: Path) -> None:
    output, picture = tmp_path / "mixed.json", tmp_path / "mixed.svg"
    text = load_test(
        *MIXED, f"--url={mock_url}", "--caps=3,1", f"--output={output}", f"--plot={picture}"
    )
    runs = result.load(output)
    assert [run.label for run in runs] == ["alone", "unguarded", "cap 1", "cap 3", "own class"]
    assert "the largest cap that keeps" in text or "no cap keeps" in text
    assert "the server's own class" in text and picture.read_text().count("</svg>") == 1
    for run in runs[1:]:
        assert run.classes["be"].num_completed == 6 and run.classes["rt"].num_arrivals > 0
        assert (run.server.be_body != {}) == (run.label == "own class")
    took = {run.label: run.classes["be"].makespan_s or 0.0 for run in runs[1:]}
    # Six answers of 40 ms one after the other: no machine does that faster.
    assert took["cap 1"] >= 6 * 39 * 0.001
    jsonschema_rs.validator_for(json.loads(load_test("--schema"))).validate(
        json.loads(output.read_text())
    )


def test_a_batch_longer_than_the_scene_is_said(mock_url: str) -> None:
    done = run_bench(
        *MIXED, f"--url={mock_url}", "--caps=1", "--batch-output-tokens=400", "--be-body={}",
        "--limit-s=0.6", "--drain-s=0",
    )  # fmt: skip
    # 1: on a busy machine a chat may be cut off as well.
    assert done.returncode in (0, 1) and not done.stderr
    assert "own class" not in done.stdout and "/6" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--caps=0",), "--caps"),
        (("--batch=0",), "--batch"),
        (("--rate=0",), "--rate"),
        (("--batch-prompt-tokens=x",), "not a length distribution"),
        (("--limit-s=10",), "at least --duration-s (30), not 10"),
        (("--be-body=1",), "--be-body"),
        (("--targets=speed=1",), "not a target"),
        (("--plot=x.docx",), "must end with"),
        (("--batch-images=x",), "--images must be a count"),
        (("--batch-images=1", "--endpoint=completions"), "--images needs --endpoint chat"),
        (("--concurrency=2",), "--concurrency"),
    ],
)
def test_wrong_arguments_of_mixed(args: tuple[str, ...], message: str) -> None:
    done = run_bench("mixed", *args, "--url=http://127.0.0.1:1")
    assert done.returncode == 2 and message in done.stderr
