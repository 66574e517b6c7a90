"""docs/metrics.md from the catalogue: `python -m tools.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys

from lightserve.metrics.catalogue import all_families
from lightserve.metrics.recording import COMMON_LABELS, Family, Kind, Origin

_HEADLINES = {
    Origin.FRONTEND: "Requests, as frontends see them",
    Origin.ROUTER: "Queues, steps and memory, as the router sees them",
    Origin.ALL: "Every process",
    Origin.SUPERVISOR: "Processes and the server itself",
}

_DIFFERENCES = (
    ("vLLM's", "here", "why"),
    ("---", "---", "---"),
    (
        "`iteration_tokens_total`",
        "`lightserve_iteration_tokens`",
        "it is a histogram; the suffix belongs to counters",
    ),
    (
        "`request_time_per_output_token_seconds`",
        "`lightserve_time_per_output_token_seconds`",
        "the mean gap of each request; older versions of vLLM had the single gaps under this name,"
        " which are `lightserve_inter_token_latency_seconds`",
    ),
    (
        "labels of all that counts requests",
        "one more, `request_class`",
        "two classes of requests share a server; sum over it for vLLM's figure",
    ),
)

_HEAD = """\
# Metrics

This page is written by `python -m tools.metrics_page > docs/metrics.md`; do not edit it.

`GET /metrics` on `--metrics-host` and `--metrics-port` (127.0.0.1:8001 unless told otherwise; a
port of 0 takes a free one, which the log names, and -1 opens none) has them in Prometheus's text
format, for all processes together: without a key on a loopback address, with an operator's key on
any other. `GET /metrics` on the server's main port has the same, with an operator's key where there
are keys.

Each process reports once a second, so values are up to about a second old. Counters and
histograms never fall while the server runs, whichever of its processes are replaced; what a
process counted in the last second before its death is lost. Names follow vLLM's after the prefix
(`lightserve_` instead of `vllm:`), and have its labels, with these exceptions:

{differences}
Every series also has the labels {common}. `request_class` is `rt` or `be`.
No label is made from what clients send: there is none for prompts, users or API keys, models are
those that are served, and routes are templates (`other` for paths that do not exist).
"""


def document() -> str:
    """Return the page."""
    common = " and ".join(f"`{label}`" for label in COMMON_LABELS)
    differences = "".join(f"| {' | '.join(row)} |\n" for row in _DIFFERENCES)
    parts = [_HEAD.format(common=common, differences=differences)]
    for origin, headline in _HEADLINES.items():
        parts.append(f"\n## {headline}\n\n| name | kind | labels | meaning |\n|---|---|---|---|\n")
        parts.extend(_row(family) for family in all_families() if family.origin is origin)
    parts.append("\n## Buckets\n\nUpper bounds; each is inclusive, and +Inf follows.\n\n")
    parts.extend(
        f"- `{family.name}`: {', '.join(f'{bound:g}' for bound in family.buckets)}\n"
        for family in all_families()
        if family.kind is Kind.HISTOGRAM
    )
    return "".join(parts)


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} |\n"


if __name__ == "__main__":
    sys.stdout.write(document())
