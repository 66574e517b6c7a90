"""Who may ask what: every route and method without a key, admin routes, hosts, salts, the log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from support.fake_router import Setup, eventually, frontend, says

from lightserve.api_keys import ApiKey, digest_of
from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.access import ADMIN_PATHS, OPEN_PATHS, Caller, KeyRing
from lightserve.frontend.app import _routers, _routes, create_app

ALICE, OPERATOR = "alice-secret-key", "operator-secret-key"
KEYS = [
    ApiKey("alice", digest_of(ALICE.encode())),
    ApiKey("ops", digest_of(OPERATOR.encode()), is_admin=True),
]
COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5], "max_tokens": 2}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"]


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def guarded(**flags: Any) -> AsyncIterator[tuple[Setup, KeyRing, Counter[str]]]:
    """A frontend that wants keys."""
    ring = KeyRing(KEYS)
    async with frontend(says([5, 2]), api_key_file="keys", **flags) as setup:
        app = create_app(setup.service, ring)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://any.host") as http:
            setup.http = http
            yield setup, ring, setup.service.observation.rejects


def test_everything_wants_a_key() -> None:
    """Routes are enumerated from the application, so that new ones cannot be forgotten."""

    async def scenario() -> None:
        async with guarded(enable_docs=True) as (setup, _, rejects):
            paths = {
                route.path
                for route in _flat(_routes(setup.service, _routers(setup.service)).routes)
            }
            assert {"/v1/completions", "/openapi.json", "/docs", "/livez"} <= paths
            paths |= {"/", "/nothing", "/v1", "/livez/", "//livez", "/LIVEZ", "*", *ADMIN_PATHS}
            paths |= {path + "/" for path in paths}
            num_open = 0
            for path in paths:
                for method in METHODS:
                    response = await setup.http.request(method, path.replace("{", "%7B"))
                    if method == "GET" and path in OPEN_PATHS:
                        assert response.status_code == 200
                        num_open += 1
                        continue
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert response.json()["error"]["code"] == "invalid_api_key"
            assert num_open == len(OPEN_PATHS) == 3
            assert rejects == {"invalid_api_key": len(paths) * len(METHODS) - num_open}

    asyncio.run(scenario())


def _flat(routes: Any) -> list[Route]:
    flat: list[Route] = []
    for route in routes:
        if isinstance(route, Route):
            flat.append(route)
        else:
            flat.extend(_flat(getattr(route, "original_router", route).routes))
    return flat


@pytest.mark.parametrize(
    "value",
    [
        *["", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer x{ALICE}"],
        *[f"Bearer {ALICE.upper()}", f"Bearer {ALICE} {ALICE}", "Bearer \xff\xfe", "Bearer ,"],
        "Bearer " + KEYS[0].digest.hex(),
    ],
)
def test_what_is_no_key(value: str) -> None:
    async def scenario() -> None:
        async with guarded() as (setup, _, _):
            headers = [(b"authorization", value.encode("latin-1"))]
            assert (await setup.http.get("/v1/models", headers=headers)).status_code == 401
            both = [*_bearer(ALICE).items(), *_bearer(ALICE).items()]
            assert (await setup.http.get("/v1/models", headers=both)).status_code == 401
            # A probe with a wrong key is a probe.
            assert (await setup.http.get("/livez", headers=headers)).status_code == 200

    asyncio.run(scenario())


def test_keys_open_routes_and_change_at_once() -> None:
    async def scenario() -> None:
        async with guarded() as (setup, ring, rejects):
            for key in (ALICE, OPERATOR):
                for scheme in ("Bearer", "bearer", "BEARER"):
                    headers = {"authorization": f"{scheme} {key}"}
                    response = await setup.http.get("/v1/models", headers=headers)
                    assert response.status_code == 200
            assert (await setup.http.get("/none", headers=_bearer(ALICE))).status_code == 404
            for path in ADMIN_PATHS:
                for method in METHODS:
                    response = await setup.http.request(method, path, headers=_bearer(ALICE))
                    assert response.status_code == 403
                response = await setup.http.get(path, headers=_bearer(OPERATOR))
                assert response.status_code != 403
            assert rejects["admin_key_required"] == len(ADMIN_PATHS) * len(METHODS)
            ring.keys = (ApiKey("bob", digest_of(b"bob-secret-key")),)
            for key, status in ((ALICE, 401), ("bob-secret-key", 200)):
                response = await setup.http.get("/v1/models", headers=_bearer(key))
                assert response.status_code == status

    asyncio.run(scenario())


def test_the_log_and_the_salt_follow_the_name(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with guarded() as (setup, ring, _):
            for key in (ALICE, OPERATOR, ALICE):
                response = await setup.http.post(
                    "/v1/completions", json=COMPLETION, headers=_bearer(key)
                )
                assert response.status_code == 200
            ring.keys = (ApiKey("alice", digest_of(b"another-secret-key")),)
            headers = _bearer("another-secret-key")
            await setup.http.post("/v1/completions", json=COMPLETION, headers=headers)
            await eventually(lambda: setup.service.in_flight.count == 0)
            salts = [submit.prefix_salt for submit in setup.router.submits]
            assert salts[0] == salts[2] == salts[3] == Caller("alice", is_admin=False).prefix_salt
            assert salts[1] not in ("", salts[0])

    with caplog.at_level("DEBUG"):
        asyncio.run(scenario())
    for secret in (ALICE, OPERATOR, "another-secret-key"):
        assert secret not in caplog.text
    assert "alice" in caplog.text
    assert "ops" in caplog.text


def test_without_keys_there_is_no_salt() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            await setup.post("/v1/completions", COMPLETION)
            assert setup.router.submits[0].prefix_salt == ""

    asyncio.run(scenario())


GOOD_HOSTS = ["localhost", "LocalHost:80", "127.0.0.1", "127.9.9.9:8000", "[::1]", "[::1]:8000"]
BAD_HOSTS = ["evil.example", "evil.example:8000", "", "localhost.evil.example", "10.0.0.1"]
BAD_HOSTS += ["localhost:", "localhost:80:80", "127.0.0.1.evil.example", "127.0.0.1, evil", "[::2]"]


@pytest.mark.parametrize(
    ("flags", "good", "bad"),
    [
        ({}, GOOD_HOSTS, [*BAD_HOSTS, "api.example"]),
        ({"allowed_hosts": "api.example, b"}, [*GOOD_HOSTS, "API.example:443", "b"], BAD_HOSTS),
        ({"host": "127.0.0.2"}, ["127.0.0.2", "localhost"], ["evil.example"]),
        ({"host": "0.0.0.0", "insecure_no_auth": True}, [*GOOD_HOSTS, "evil.example"], []),
    ],
)
def test_hosts_without_keys(flags: dict[str, Any], good: list[str], bad: list[str]) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), **flags) as setup:
            for path in ("/livez", "/v1/models", "/none"):
                for host in good:
                    response = await setup.http.get(path, headers={"host": host})
                    assert response.status_code in (200, 404), host
                for host in bad:
                    response = await setup.http.get(path, headers={"host": host})
                    assert response.status_code == 421, host
                    assert response.json()["error"]["code"] == "invalid_host"

    asyncio.run(scenario())


def test_no_cors_and_no_server_name() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
            for method in ("OPTIONS", "GET", "POST"):
                response = await setup.http.request(method, "/v1/models", headers=headers)
                names = set(response.headers)
                assert not {name for name in names if name.startswith("access-control")}
                assert not {"server", "x-powered-by"} & names

    asyncio.run(scenario())


@pytest.mark.parametrize("enabled", [False, True])
def test_docs_are_a_page_on_request(enabled: bool) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), enable_docs=enabled) as setup:
            status = 200 if enabled else 404
            assert (await setup.http.get("/docs")).status_code == status
            schema = (await setup.http.get("/openapi.json")).json()
            assert "/v1/completions" in schema["paths"]

    asyncio.run(scenario())


def test_figures_are_for_operators() -> None:
    """/health is open, what all clients together do is not."""

    async def scenario() -> None:
        async with guarded() as (setup, _, _):
            for headers, tells in (
                ({}, False),
                (_bearer("wrong"), False),
                (_bearer(ALICE), False),
                (_bearer(OPERATOR), True),
            ):
                response = await setup.http.get("/health", headers=headers)
                assert response.status_code == 200
                assert ("num_in_flight" in response.json()) == tells
        async with frontend(says([5, 2])) as setup:
            assert "num_in_flight" in (await setup.http.get("/health")).json()

    asyncio.run(scenario())
