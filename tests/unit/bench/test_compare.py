"""Servers beside each other: turns, ratios within rounds, failures."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from bench.engine import compare
from bench.engine.compare import Figures, Load, table


def test_ratios_are_taken_within_a_round() -> None:
    text = table(
        [Figures("single", "ms", {"ours": [10.0, 20.0, 30.0], "theirs": [20.0, 20.0, 90.0]})]
    )
    assert text.splitlines()[2:] == [
        "| single | ms | ours | 20 | 1.00 | 1.00 to 1.00 |",
        "| single | ms | theirs | 20 | 2.00 | 1.00 to 3.00 |",
    ]


@pytest.mark.parametrize("num_failed", [0, 1])
def test_servers_take_turns_and_a_failure_is_told(
    num_failed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measure(url: str, load: Load, extra: Sequence[str]) -> tuple[dict[str, float], int]:
        asked.append(url)
        assert extra == ["--model", "m"] and "--concurrency" in load.flags
        return dict.fromkeys(load.read, float(len(asked))), num_failed

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "QUIET_S", 0.0)
    words = ["compare", "a=http://a", "b=http://b=1", "--rounds", "3", "--only", "single"]
    monkeypatch.setattr(sys, "argv", [*words, "--", "--model", "m"])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert asked == ["http://a", "http://b=1", "http://b=1", "http://a", "http://a", "http://b=1"]
    assert bool(ended.value.code) is (num_failed > 0)
    out = capsys.readouterr().out
    assert "| single | ms per token | b | 3 | 1.20 | 0.75 to 2.00 |" in out
    assert f"{3 * 2 * num_failed} requests failed" in out
