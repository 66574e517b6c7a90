"""A policy from outside the package: found by MODULE:CLASS, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from lightserve.cli import simulate
from lightserve.config import ServeConfig
from lightserve.decisions.records import header_of
from lightserve.errors import ConfigError
from lightserve.router.policies import make_policy
from lightserve.router.slo import TokenDeadlines
from lightserve.types import SLO
from tests.support.policy_scenes import BE, RT, make_request, select

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = "own_policy:ShortAnswersFirst"
DEADLINES = "own_policy:DeadlinesFirst"


@pytest.fixture(autouse=True)
def examples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_it_decides() -> None:
    policy = make_policy(ServeConfig(policy=OWN))
    decode = make_request(0, output=1)
    newcomers = [make_request(1, BE), make_request(2, RT), make_request(3, RT)]
    for request, max_tokens in zip(newcomers, (2, 9, 5), strict=True):
        request.max_tokens = max_tokens
    assert select(policy, [decode, *newcomers], budget=10) == [(0, 1), (3, 8), (2, 1)]


def test_the_nearest_deadline_and_the_longest_prefix_go_first() -> None:
    policy = make_policy(ServeConfig(policy=DEADLINES))
    decode, late, soon = make_request(0, output=1), make_request(1, RT), make_request(2, RT)
    for request, ttft_ms in ((decode, 500.0), (late, 900.0), (soon, 200.0)):
        request.deadlines = TokenDeadlines(SLO(ttft_ms=ttft_ms, tpot_ms=50.0), 0.0)
    best_effort, cached = make_request(3, BE), make_request(4, BE)
    cached.num_computed_tokens = 4
    order = select(policy, [decode, best_effort, cached, late, soon], budget=100)
    assert [number for number, _ in order] == [0, 2, 1, 4, 3]


def test_the_page_shows_the_policy_of_the_example() -> None:
    """In fewer than fifteen lines."""
    page = (EXAMPLES.parent / "docs/scheduling.md").read_text()
    block = page.partition("class DeadlinesFirst:")[2].partition("```")[0]
    shown = [line.partition("  #")[0].rstrip() for line in block.splitlines() if line.strip()]
    assert 5 < len(shown) < 15
    example = (EXAMPLES / "own_policy.py").read_text().replace("step: Step) -> None", "step)")
    assert all(line.strip() in example for line in shown)


def test_the_simulator_compares_them() -> None:
    flags = "--rt poisson:8 --rt-lengths uniform:16-32,4-8 --duration-s 2 --margin-s 0.5"
    names = [*flags.split(), "--compare", f"{OWN},{DEADLINES}"]
    invoked = CliRunner().invoke(simulate.command, names, standalone_mode=False)
    assert invoked.exception is None
    assert f"  {OWN}     {DEADLINES}\n" in invoked.stdout, "columns are as wide as their titles"


def test_a_decision_log_says_which_it_was() -> None:
    header = header_of(ServeConfig(policy=OWN), max_model_len=64, seed=0, boot_id="x")
    assert OWN in repr(header)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("own_policy", "--policy must be one of chunked,"),
        ("MODULE:CLASS", "--policy MODULE:CLASS: ModuleNotFoundError: No module named"),
        ("own policy:X", "unified, MODULE:CLASS, got 'own policy:X'"),
        ("gone:X", "--policy gone:X: ModuleNotFoundError: No module named 'gone'"),
        ("own_policy:Gone", "--policy own_policy:Gone: AttributeError: module 'own_policy' has"),
        ("own_policy:Step", "--policy own_policy:Step: TypeError: "),
        ("pathlib:Path", "--policy pathlib:Path is no policy: it has no is_class_aware, meets_d"),
    ],
)
def test_what_is_no_policy_is_refused(value: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_policy(ServeConfig(policy=value))
    assert complaint in str(refused.value)
