"""What the scheduling benches print and keep where there is little, old or nothing asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_states import Reading

from bench.scheduling import margins
from bench.scheduling.paper_figures import Figure, print_table
from bench.scheduling.planner_optimality import Comparison, report


def test_states_of_which_none_is_feasible(capsys: pytest.CaptureFixture[str]) -> None:
    report(Reading.SHARE, [None, None])
    assert "none feasible" in capsys.readouterr().out
    report(Reading.SHARE, [Comparison(3, 2, True, 1.0, None), None])
    assert "1 feasible, 0 missed = 0.00%" in capsys.readouterr().out


def test_cells_without_a_newer_column_have_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"old": {"ttft": Figure(99.0, 0.0)}}, ["ttft", "e2e"])
    assert capsys.readouterr().out.splitlines()[-1] == "| old | 99.0 | - |"


def test_runs_are_kept_where_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def play(*run: object) -> margins.Figures:
        played.append(run)
        return margins.Figures(1.0, 2.0, 3.0, 4.0, 5.0)

    monkeypatch.setattr(margins, "play", play)
    monkeypatch.chdir(tmp_path)
    arguments = ["margins", "--scene", "overload", "--row", "MAX_SHARE"]
    for more in ([], ["--runs", "kept"], ["--runs", "kept"]):
        monkeypatch.setattr("sys.argv", arguments + more)
        margins.main()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and len(played) == 2
