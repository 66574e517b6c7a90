"""`--preset`: what it sets, and what stands over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightserve.cli import simulate
from lightserve.config import ServeConfig
from lightserve.config.file import Origin, merge
from lightserve.config.scheduling import PRESETS, preset_values
from lightserve.errors import ConfigError
from lightserve.router.config import make_scheduler_config

DEFAULTS = {name: getattr(ServeConfig(), name) for name in ServeConfig.__dataclass_fields__}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_server(preset: str) -> None:
    """And each of its options says something: it is not what the server has anyhow, or is named
    because the paper is about it."""
    merged = merge(DEFAULTS, given=(), from_file={}, preset=preset)
    config = ServeConfig(**merged.values)
    assert {name: getattr(config, name) for name in PRESETS[preset]} == PRESETS[preset]
    make_scheduler_config(config, max_model_len=64)
    of_preset = {name for name, origin in merged.origins.items() if origin is Origin.PRESET}
    assert of_preset == set(PRESETS[preset])


def test_flags_and_files_stand_over_it() -> None:
    values = DEFAULTS | {"watermark": 0.5}
    merged = merge(values, given={"watermark"}, from_file={"block_size": 8}, preset="bros")
    assert (merged.values["watermark"], merged.values["block_size"]) == (0.5, 8)
    assert merged.origins["watermark"] is Origin.FLAG
    assert merged.origins["block_size"] is Origin.FILE
    assert merged.values["policy"] == "bros"


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        ({"policy": "priority"}, {"slo_clock"}),
        ({"admission": "risk"}, {"watermark"}),
    ],
)
def test_what_goes_with_another_choice_is_left_to_it(given: dict[str, Any], gone: set[str]) -> None:
    found = preset_values("bros", given=given, values=DEFAULTS | given)
    assert set(PRESETS["bros"]) - set(found) == gone | set(given)
    ServeConfig(**{**found, **given})


def test_the_simulator_takes_them_and_says_so(tmp_path: Path) -> None:
    flags = (
        "--rt poisson:8 --rt-lengths uniform:16-32,4-8 --be closed:2 --be-lengths uniform:9-9,3-3"
        " --duration-s 2 --margin-s 0.5 --json --preset accelgen --victims latest"
    )
    log = tmp_path / "log.jsonl"
    invoked = CliRunner().invoke(
        simulate.command, [*flags.split(), "--decision-log", str(log)], standalone_mode=False
    )
    assert invoked.exception is None, invoked.output
    assert "preset accelgen: policy='accelgen' slo_clock='gap'" in invoked.stderr
    config = json.loads(log.read_text().splitlines()[0])["config"]
    assert config["victims"] == "latest"
    assert {name: config[name] for name in ("policy", "preemption", "cache_policy")} == {
        "policy": "accelgen",
        "preemption": "recompute",
        "cache_policy": "off",
    }


def test_so_many_finished_lengths_are_remembered() -> None:
    lengths = make_scheduler_config(ServeConfig(window=3), max_model_len=64).lengths
    for length in range(1, 9):
        lengths.record(length)
    assert len(lengths) == 3
    with pytest.raises(ConfigError, match="--window needs --admission past-future or risk, got"):
        ServeConfig(window=3, admission="ema")
