"""The examples for Kubernetes, as far as they can be checked without a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from lightserve.cli import serve as cli_serve
from lightserve.config import ServeConfig
from lightserve.frontend.middleware import Access, access_to
from lightserve.metrics.catalogue import family_named
from lightserve.supervisor import loop

DIRECTORY = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
OLDEST, NEWEST = "1.30", "1.37"
BUILT_IN = ("v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")


def documents() -> dict[tuple[str, str], dict[str, Any]]:
    """All of them, by kind and name."""
    found = {}
    for path in sorted(DIRECTORY.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            key = (document["kind"], document["metadata"]["name"])
            assert key not in found
            found[key] = document
    return found


DOCUMENTS = documents()
DEPLOYMENT = DOCUMENTS["Deployment", "lightserve"]
POD = DEPLOYMENT["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], ServeConfig]:
    """Returns what the command line of a server stands for."""

    def parse(flags: list[str]) -> ServeConfig:
        served: list[ServeConfig] = []
        monkeypatch.setattr(loop, "serve", lambda config, **_: served.append(config) or 0)
        result = CliRunner().invoke(cli_serve.command, flags, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return served[0]

    return parse


Parsed = Callable[[list[str]], ServeConfig]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_built_in_kinds_follow_their_schemas(version: str) -> None:
    checked = [one for one in DOCUMENTS.values() if one["apiVersion"] in BUILT_IN]
    assert len(checked) == 6
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    SERVER["readinesProbe"] = SERVER["readinessProbe"]
    try:
        with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
            kubernetes_validate.validate(DEPLOYMENT, version, strict=True)
    finally:
        del SERVER["readinesProbe"]


def test_the_server_takes_the_arguments(parsed: Parsed) -> None:
    assert SERVER["args"][0] == "serve"
    config = parsed(SERVER["args"][1:])
    assert config.batch_store == "none"  # one pod's would not be known to the others
    assert (config.host, config.port) == ("0.0.0.0", SERVER["ports"][0]["containerPort"])
    # What happens between the order to end and the kill has time enough.
    pause_s = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = POD["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > pause_s + config.shutdown_timeout_s
    # Keys lie where they are mounted, and can be read by the group of the process.
    (mount,) = [one for one in SERVER["volumeMounts"] if one["name"] == "api-keys"]
    assert config.api_key_file.startswith(mount["mountPath"] + "/")
    (volume,) = [one for one in POD["spec"]["volumes"] if one["name"] == "api-keys"]
    assert volume["secret"]["defaultMode"] == 0o440


def test_the_gateways_arguments_are_taken_too(parsed: Parsed) -> None:
    text = (DIRECTORY / "inference-pool.yaml").read_text()
    match = re.search(r"#\s+(--insecure-no-auth .*)", text)
    assert match is not None
    config = parsed(["--host=0.0.0.0", *match[1].split()])
    priorities = {
        name: document["spec"]["priority"]
        for (kind, name), document in DOCUMENTS.items()
        if kind == "InferenceObjective"
    }
    assert config.objectives == priorities


def test_probes_need_no_key_and_exist() -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert access_to(SERVER[probe]["httpGet"]["path"]) is Access.OPEN
        assert SERVER[probe]["httpGet"]["port"] == SERVER["ports"][0]["name"]


def test_all_select_the_pods_of_the_deployment() -> None:
    labels = POD["metadata"]["labels"]
    pool = DOCUMENTS["InferencePool", "lightserve"]["spec"]
    selectors = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        DOCUMENTS["Service", "lightserve"]["spec"]["selector"],
        DOCUMENTS["PodDisruptionBudget", "lightserve"]["spec"]["selector"]["matchLabels"],
        DOCUMENTS["NetworkPolicy", "lightserve"]["spec"]["podSelector"]["matchLabels"],
        pool["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    port = SERVER["ports"][0]["containerPort"]
    assert pool["targetPorts"] == [{"number": port}]
    (rule,) = DOCUMENTS["NetworkPolicy", "lightserve"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": port}]
    for name in ("HorizontalPodAutoscaler", "ScaledObject"):
        target = DOCUMENTS[name, "lightserve"]["spec"]["scaleTargetRef"]
        assert target["name"] == DEPLOYMENT["metadata"]["name"]


def test_all_metrics_exist_with_their_labels() -> None:
    hpa = DOCUMENTS["HorizontalPodAutoscaler", "lightserve"]["spec"]["metrics"][0]["pods"]["metric"]
    texts = [
        hpa["name"] + "{" + ",".join(f"{k}={v}" for k, v in hpa["selector"]["matchLabels"].items()),
        DOCUMENTS["ScaledObject", "lightserve"]["spec"]["triggers"][0]["metadata"]["query"],
    ]
    picker = yaml.safe_load(DOCUMENTS["ConfigMap", "lightserve-picker"]["data"]["config.yaml"])
    plugins = {one["type"]: one.get("parameters", {}) for one in picker["plugins"]}
    engine = plugins["core-metrics-extractor"]["engineConfigs"][0]
    assert engine["name"] == POD["metadata"]["labels"]["llm-d.ai/engine-type"]
    texts += [text for name, text in engine.items() if name.endswith("Spec")]
    assert len(texts) == 5
    for text in texts:
        match = re.search(r"(lightserve_\w+)(?:\{(\w+)=\"?(\w+))?", text)
        assert match is not None
        family = family_named(match[1])
        assert family is not None and {match[2]} - {None} <= {*family.labels}, text
        assert match[2] != "request_class" or match[3] == "rt"
    for profile in picker["schedulingProfiles"]:
        assert {one["pluginRef"] for one in profile["plugins"]} <= set(plugins)
