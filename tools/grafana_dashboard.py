"""The dashboard for Grafana, docker/monitoring/grafana/lightserve.json: this prints it.

Panels in rows of three; each is a title, a unit and its queries with their legends.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

_OF = 'job="$job",instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


class Panel(NamedTuple):
    """One picture."""

    title: str
    unit: str
    """As Grafana calls it."""
    queries: tuple[tuple[str, str], ...]
    """PromQL, in which OF stands for the chosen job and instances, and a legend."""
    description: str = ""


def _quantile(share: float, name: str, more: str = "") -> str:
    by = "le, request_class"
    return (
        f"histogram_quantile({share}, sum by ({by})"
        f" (rate(lightserve_{name}_bucket{{OF{more}}}[$__rate_interval])))"
    )


def _rate(name: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate(lightserve_{name}{{OF{more}}}[$__rate_interval]))"


def _latency(title: str, name: str) -> Panel:
    queries = ((0.5, "p50"), (0.99, "p99"))
    return Panel(
        title,
        "s",
        tuple((_quantile(share, name), f"{{{{request_class}}}} {word}") for share, word in queries),
    )


PANELS = (
    Panel(
        "Attainment of all targets",
        "percentunit",
        (("lightserve:attainment:ratio5m{OF}", "{{instance}} {{request_class}}"),),
        "Of the requests that ended in five minutes, those that met every target they had.",
    ),
    Panel(
        "Missed targets",
        "reqps",
        (
            (
                _rate("slo_requests_total", "request_class, target", ',outcome="missed"'),
                "{{request_class}} {{target}}",
            ),
        ),
    ),
    Panel(
        "Requests",
        "short",
        (
            (
                "sum by (request_class) (lightserve_num_requests_running{OF})",
                "{{request_class}} running",
            ),
            (
                "sum by (request_class) (lightserve_num_requests_waiting{OF})",
                "{{request_class}} waiting",
            ),
        ),
    ),
    _latency("Time to the first token", "time_to_first_token_seconds"),
    _latency("Largest gap between tokens", "max_inter_token_latency_seconds"),
    _latency("Mean time per output token", "time_per_output_token_seconds"),
    Panel(
        "Tokens delivered",
        "short",
        ((_rate("generation_tokens_total", "request_class"), "{{request_class}} per second"),),
    ),
    Panel(
        "Tokens computed",
        "short",
        (
            (
                _rate("computed_tokens_total", "request_class, kind"),
                "{{request_class}} {{kind}} per second",
            ),
        ),
    ),
    Panel(
        "Wait until all that waits has begun",
        "s",
        (
            (
                "max by (request_class) (lightserve_predicted_wait_seconds{OF})",
                "{{request_class}}",
            ),
        ),
        "As the router predicts it: Retry-After, before it is bounded.",
    ),
    Panel(
        "KV slots",
        "short",
        (
            ("sum(lightserve_kv_slots_used_peak{OF})", "used, at most"),
            ("sum(lightserve_kv_slots_forecast_peak{OF})", "forecast"),
            ("sum(lightserve_kv_slots_cached{OF})", "cached prefixes"),
            ("sum(lightserve_kv_slots{OF})", "all"),
        ),
    ),
    Panel(
        "Requests held up, by reason",
        "short",
        (
            (
                _rate("requests_skipped_total", "request_class, reason")
                + " / on () group_left sum(rate(lightserve_steps_total{OF}[$__rate_interval]))",
                "{{request_class}} {{reason}}",
            ),
        ),
        "Requests that a step considered and left out, on average over the steps.",
    ),
    Panel(
        "Pauses and preemptions",
        "short",
        (
            (_rate("pauses_total", "request_class"), "{{request_class}} paused per second"),
            (_rate("num_preemptions_total", "instance"), "{{instance}} lost KV, per second"),
        ),
    ),
    Panel(
        "Step time, predicted and real",
        "s",
        tuple(
            (
                f"sum(rate(lightserve_{name}_sum{{OF}}[$__rate_interval]))"
                f" / sum(rate(lightserve_{name}_count{{OF}}[$__rate_interval]))",
                word,
            )
            for name, word in (
                ("predicted_step_time_seconds", "predicted"),
                ("step_time_seconds", "real"),
            )
        ),
    ),
    Panel(
        "Worker",
        "percentunit",
        (
            (_rate("worker_busy_seconds_total", "instance"), "{{instance}} busy"),
            (_rate("worker_idle_seconds_total", "instance"), "{{instance}} waits for a plan"),
        ),
    ),
    Panel(
        "Prefix cache",
        "percentunit",
        (
            (
                _rate("prefix_cache_hits_total", "request_class")
                + " / "
                + _rate("prefix_cache_queries_total", "request_class"),
                "{{request_class}} found",
            ),
        ),
    ),
    Panel(
        "Guesses that were right",
        "percentunit",
        (
            (
                _rate("spec_decode_num_accepted_tokens_total", "request_class, proposer")
                + " / "
                + _rate("spec_decode_num_draft_tokens_total", "request_class, proposer"),
                "{{request_class}} {{proposer}}",
            ),
        ),
        "Of the tokens that were guessed and verified (--speculation).",
    ),
    Panel(
        "Batches",
        "short",
        (
            ('sum(lightserve_batches{OF,status="in_progress"})', "in progress"),
            ("sum(lightserve_batches_late{OF})", "late"),
            ("max(lightserve_batch_forecast_ratio{OF})", "forecast / window, at most"),
        ),
    ),
    Panel(
        "Failures",
        "reqps",
        ((_rate("request_failure_total", "request_class, code"), "{{request_class}} {{code}}"),),
    ),
    Panel(
        "Replicas",
        "short",
        (
            ('lightserve:replicas_needed:attainment99{job="$job"}', "needed for 99 %"),
            ('count(lightserve_kv_slots{job="$job"} > 0)', "that serve"),
        ),
        "Load over the largest that one replica has carried in a day with 99 % in time.",
    ),
)


def document() -> str:
    """Return the dashboard."""
    panels = [_panel(panel, index) for index, panel in enumerate(PANELS)]
    dashboard = {
        "uid": "lightserve",
        "title": "lightserve",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "source"},
                _variable("job", "label_values(lightserve_build_info, job)"),
                _variable(
                    "instance",
                    'label_values(lightserve_build_info{job="$job"}, instance)',
                    is_many=True,
                ),
            ]
        },
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _variable(name: str, query: str, *, is_many: bool = False) -> dict[str, Any]:
    more = {"multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}}
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        **(more if is_many else {}),
    }


def _panel(panel: Panel, index: int) -> dict[str, Any]:
    row, column = divmod(index, _PER_ROW)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.replace("{OF", "{" + _OF),
                "legendFormat": legend,
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(document())
