"""Rules, alerts and the Grafana dashboard: they use only metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightserve.messages.frontend_router import ErrorCode
from lightserve.messages.supervision import Role
from lightserve.metrics.catalogue import all_families
from lightserve.metrics.recording import COMMON_LABELS, Family, Kind
from lightserve.types import RequestClass
from tools.grafana_dashboard import PANELS, document

MONITORING = Path(__file__).resolve().parents[3] / "docker" / "monitoring"
TARGET_LABELS = {"job", "instance"}
CLOSED_SETS = {
    "request_class": {each.value for each in RequestClass},
    "code": {each.value for each in ErrorCode},
    "role": {each.value for each in Role},
    "outcome": {"met", "missed"},
    "target": {"all", "ttft", "tpot", "mtpot", "completion"},
    "status": {"in_progress"},
}


def _load(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def _rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in _load(name)["groups"] for rule in group["rules"]]


RULES = [*_rules("rules.yml"), *_rules("alerts.yml")]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
PANEL_QUERIES = [
    target["expr"] for panel in json.loads(document())["panels"] for target in panel["targets"]
]
QUERIES = [*(rule["expr"] for rule in RULES), *PANEL_QUERIES]


def _series() -> dict[str, tuple[Family, set[str]]]:
    """Return every name that a scrape can have, with its family and labels."""
    found = {}
    for family in all_families():
        labels = {*family.labels, *COMMON_LABELS, *TARGET_LABELS}
        if family.kind is Kind.HISTOGRAM:
            found[f"{family.name}_bucket"] = (family, labels | {"le"})
            found[f"{family.name}_sum"] = found[f"{family.name}_count"] = (family, labels)
        else:
            found[family.name] = (family, labels)
    return found


SERIES = _series()


def complaints(query: str) -> Iterator[str]:
    """Yield what a query uses and no server has."""
    names = re.findall(r"\b(lightserve[:_][\w:]*)(?:\{([^}]*)\})?", query)
    if not names and "up{" not in query:
        yield "no metric"
    allowed = set(TARGET_LABELS)
    for name, matchers in names:
        if name.startswith("lightserve:"):
            labels = TARGET_LABELS | {"request_class"}
            if name not in RECORDED:
                yield name
        elif name not in SERIES:
            yield name
            continue
        else:
            labels = SERIES[name][1]
        allowed |= labels
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            if label not in labels:
                yield f"{name}: {label}"
            elif not value.startswith("$") and label in CLOSED_SETS:
                yield from [f"{label}: {value}"] if value not in CLOSED_SETS[label] else []
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        yield from (f"by {x}" for x in re.split(r",\s*", group) if x and x not in allowed)


@pytest.mark.parametrize("query", QUERIES)
def test_only_what_exists_is_used(query: str) -> None:
    assert list(complaints(query)) == []


@pytest.mark.parametrize(
    "query",
    [
        "lightserve_no_such_thing",
        "lightserve_step_time_seconds",
        "rate(lightserve_steps_total_sum[5m])",
        'lightserve_num_requests_running{request_class="realtime"}',
        'lightserve_steps_total{request_class="rt"}',
        "sum by (request_class) (lightserve_kv_slots)",
        "lightserve:no_such_rule",
        "up",
    ],
)
def test_what_does_not_exist_is_found(query: str) -> None:
    assert list(complaints(query)) != []


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for query, legend in panel.queries:
            kept = re.findall(r"by \(([^)]*)\)", query)
            for label in re.findall(r"{{(\w+)}}", legend):
                assert any(label in group for group in kept) or query.startswith("lightserve:")


def test_every_alert_says_what_and_how_bad() -> None:
    for rule in _rules("alerts.yml"):
        assert set(rule["labels"]) == {"severity"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
    assert len({rule["alert"] for rule in _rules("alerts.yml")}) == len(_rules("alerts.yml"))


def test_the_dashboard_is_the_one_that_is_made() -> None:
    page = MONITORING / "grafana" / "lightserve.json"
    assert page.read_text() == document(), (
        "python -m tools.grafana_dashboard > docker/monitoring/grafana/lightserve.json"
    )
    panels = json.loads(document())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) and all(x + 8 <= 24 for x, _ in places)


def test_the_provisioned_files_are_read() -> None:
    assert _load("grafana/datasource.yml")["datasources"][0]["type"] == "prometheus"
    assert _load("grafana/dashboards.yml")["providers"][0]["type"] == "file"
    (scrape,) = _load("prometheus.yml")["scrape_configs"]
    assert scrape["job_name"] == "lightserve"


def test_promtool_agrees(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (Debian's package prometheus)")
    queries = [{"record": f"test:{i}", "expr": _spoken(q)} for i, q in enumerate(PANEL_QUERIES)]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": queries}]})
    )
    for arguments in (
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "rules_test.yml"],
        ["check", "rules", str(tmp_path / "panels.yml")],
    ):
        result = subprocess.run(
            [promtool, *arguments],
            cwd=MONITORING,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr


def _spoken(query: str) -> str:
    """Return a query with Grafana's variables filled in."""
    return query.replace("$__rate_interval", "1m").replace("$job", "j").replace("$instance", ".*")
