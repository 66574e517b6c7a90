"""--served-model-name: one name, several, any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.supervisor.startup import resolve_model


@pytest.mark.parametrize(
    ("flag", "names", "takes_any"),
    [
        ("", (BUNDLED_MODEL_NAME,), False),
        ("a", ("a",), False),
        ("a, b,a", ("a", "b"), False),
        ("a,*,b", ("a", "b"), True),
        ("*", (BUNDLED_MODEL_NAME,), True),
    ],
)
def test_names_are_the_same_before_and_after_the_model_is_found(
    flag: str, names: tuple[str, ...], takes_any: bool
) -> None:
    config = ServeConfig(served_model_name=flag)
    for seen in (config, resolve_model(config), resolve_model(resolve_model(config))):
        assert (seen.model_names, seen.takes_any_model_name) == (names, takes_any)
        assert seen.model_name == names[0]


def test_a_directory_gives_the_name_that_its_path_had(tmp_path: Path) -> None:
    (link := tmp_path / "my-model").symlink_to(BUNDLED_MODEL_DIR)
    resolved = resolve_model(ServeConfig(model=str(link), served_model_name="*"))
    assert (resolved.model_name, resolved.takes_any_model_name) == ("my-model", True)


def test_any_name_is_accepted_and_echoed() -> None:
    async def scenario() -> None:
        async with frontend(says([300, 2]), served_model_name="own,*") as setup:
            listed = (await setup.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["own"]
            assert (await setup.http.get("/v1/models/gpt-4/x")).json()["id"] == "gpt-4/x"
            for name in ("own", "gpt-4", "é" * 256):
                body: dict[str, Any] = {"model": name, "prompt": "hi"}
                assert (await setup.post("/v1/completions", body)).json()["model"] == name
                streamed = await setup.post("/v1/completions", body | {"stream": True})
                assert {chunk["model"] for chunk in sse_data(streamed.text)[:-1]} == {name}
            for name in ("", "x" * 257):
                refused = await setup.post("/v1/completions", {"model": name, "prompt": "hi"})
                assert refused.status_code == 400
                error = refused.json()["error"]
                assert error["message"] == f"model must have 1 to 256 characters, got {len(name)}"

    asyncio.run(scenario())


def test_each_of_several_names_is_accepted_and_no_other() -> None:
    async def scenario() -> None:
        async with frontend(says([300, 2]), served_model_name="a,b") as setup:
            for name, status in (("a", 200), ("b", 200), ("c", 404), ("*", 404)):
                answer = await setup.post("/v1/completions", {"model": name, "prompt": "hi"})
                assert answer.status_code == status

    asyncio.run(scenario())
