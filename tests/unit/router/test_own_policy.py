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
from tests.support.policy_scenes import BE, RT, make_request, select

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = "own_policy:ShortAnswersFirst"


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


def test_the_simulator_compares_it() -> None:
    flags = "--rt poisson:8 --rt-lengths uniform:16-32,4-8 --duration-s 2 --margin-s 0.5"
    invoked = CliRunner().invoke(
        simulate.command, [*flags.split(), "--compare", f"{OWN},chunked"], standalone_mode=False
    )
    assert invoked.exception is None
    assert OWN in invoked.stdout


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
