from __future__ import annotations

import json
from typing import Any

import pytest

from lightserve.errors import ModelLoadError
from lightserve.frontend.request_options import SamplingDefaults, read_sampling_defaults


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"do_sample": False}, SamplingDefaults()),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=50),
        ),
        ({"temperature": 0, "top_k": 0, "top_p": None}, SamplingDefaults(temperature=0.0)),
        ({"temperature": 2.0, "top_k": 2304}, SamplingDefaults(temperature=2.0, top_k=2304)),
        ({"top_k": 2305}, SamplingDefaults(top_k=0)),
        ({"top_k": -1}, SamplingDefaults(top_k=0)),
        ({"temperature": 2.001}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "x"}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_defaults_come_from_the_generation_config(
    tmp_path: Any, values: dict[str, Any], expected: SamplingDefaults | str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    if isinstance(expected, str):
        with pytest.raises(ModelLoadError, match=expected) as caught:
            read_sampling_defaults(tmp_path, vocab_size=2304)
        assert "generation_config.json" in str(caught.value)
    else:
        assert read_sampling_defaults(tmp_path, vocab_size=2304) == expected
