"""Tables that are written by hand have what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightserve
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest

DOCS = Path(lightserve.__file__).parents[1] / "docs"


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_field_of_the_api_is_described(model: type[StrictModel]) -> None:
    page = (DOCS / "api.md").read_text()
    described = set(re.findall(r"`(\w+)`", page))
    assert set(model.model_fields) - described == set()
