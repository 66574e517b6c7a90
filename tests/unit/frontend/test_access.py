"""Who may ask what: every route and method without a key, admin routes, hosts, salts, the log."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from support.fake_router import Setup, eventually, frontend, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.frontend.middleware import (
    ROUTE_ACCESS,
    Access,
    Caller,
    KeyRing,
    access_to,
)
from lightserve.frontend.process import _routers, create_app, make_routes
from lightserve.http_access import ApiKey, Quota, digest_of
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, Submit
from lightserve.metrics.recording import OTHER
from lightserve.types import FinishReason

ALICE, OPERATOR, GATE = "alice-secret-key", "operator-secret-key", "gateway-secret-key"
FAIRNESS = "x-gateway-fairness-id"
KEYS = [
    ApiKey("alice", digest_of(ALICE.encode())),
    ApiKey("ops", digest_of(OPERATOR.encode()), is_admin=True),
    ApiKey("gate", digest_of(GATE.encode()), is_gateway=True, quota=Quota(rpm=7, tpm=9)),
]
COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5], "max_tokens": 2}
OPEN_PATHS = [path for path, access in ROUTE_ACCESS.items() if access is Access.OPEN]
ADMIN_PATHS = [path for path, access in ROUTE_ACCESS.items() if access is Access.OPERATOR]
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
                for route in _flat(make_routes(setup.service, _routers(setup.service)).routes)
            }
            assert {"/v1/completions", "/openapi.json", "/docs", "/livez"} <= paths
            paths |= {"/", "/nothing", "/v1", "/livez/", "//livez", "/LIVEZ", "*", *ADMIN_PATHS}
            paths |= {path + "/" for path in paths} | {path + "%0A" for path in paths}
            num_open = num_bad = 0
            for path in paths:
                for method in METHODS:
                    response = await setup.http.request(method, path.replace("{", "%7B"))
                    if method in ("GET", "HEAD") and path.removesuffix("%0A") in OPEN_PATHS:
                        is_plain = path in OPEN_PATHS
                        assert response.status_code == (200 if is_plain else 400)
                        num_bad += not is_plain
                        num_open += 1
                        continue
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        error = response.json()["error"]
                        is_anthropic = f"{path}/".startswith("/v1/messages/")
                        code = error["details"]["error_code"] if is_anthropic else error["code"]
                        assert code == "invalid_api_key"
            assert num_open == 16 and num_bad == 8 and len(OPEN_PATHS) == 4
            assert rejects == {
                "invalid_api_key": len(paths) * len(METHODS) - num_open,
                "invalid_path": num_bad,
            }

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
            for mixed in (ALICE, value):  # an Authorization decides, whatever is beside it
                more = [*headers, (b"x-api-key", mixed.encode("latin-1"))]
                assert (await setup.http.get("/v1/models", headers=more)).status_code == 401
            both = [*_bearer(ALICE).items(), *_bearer(ALICE).items()]
            assert (await setup.http.get("/v1/models", headers=both)).status_code == 401
            # A probe with a wrong key is a probe.
            assert (await setup.http.get("/livez", headers=headers)).status_code == 200

    asyncio.run(scenario())


def test_keys_open_routes_and_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.dashboard.MAX_VIEW_S", 0.0)

    async def scenario() -> None:
        async with guarded() as (setup, ring, rejects):
            for key in (ALICE, OPERATOR):
                for scheme in ("Bearer", "bearer", "BEARER"):
                    headers = {"authorization": f"{scheme} {key}"}
                    response = await setup.http.get("/v1/models", headers=headers)
                    assert response.status_code == 200
                headers = {"x-api-key": key}
                assert (await setup.http.get("/v1/models", headers=headers)).status_code == 200
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


@pytest.mark.parametrize("path", ["/metrics", "/load", "/debug/kv"])
@pytest.mark.parametrize("more", ["%0A", "%0a", "%0D", "%00", "%7F", "%C2%85", "%0A%0A"])
def test_another_spelling_of_a_path_opens_nothing(path: str, more: str) -> None:
    """A route's pattern may match more than its own path: the route decides, not the text."""

    async def scenario() -> None:
        async with guarded() as (setup, _, rejects):
            for key in (ALICE, OPERATOR):
                response = await setup.http.get(path + more, headers=_bearer(key))
                assert response.status_code in (400, 403)
            assert rejects["invalid_path"] >= 1
            plain = await setup.http.get("/v1/models%0A", headers=_bearer(ALICE))
            assert (plain.status_code, plain.json()["error"]["code"]) == (400, "invalid_path")
        async with frontend(says([5, 2])) as setup:
            assert (await setup.http.get(path + more)).status_code == 400

    asyncio.run(scenario())


def test_a_route_that_is_not_declared_is_for_operators() -> None:
    assert access_to("/new") is Access.OPERATOR


def test_every_route_is_declared() -> None:
    async def scenario() -> set[str]:
        async with frontend(enable_docs=True) as setup:
            return {
                route.path
                for route in _flat(make_routes(setup.service, _routers(setup.service)).routes)
            }

    assert asyncio.run(scenario()) | {OTHER} == set(ROUTE_ACCESS)


def test_head_is_get_without_a_body() -> None:
    async def scenario() -> None:
        async with guarded() as (setup, _, _):
            for path in ("/livez", "/v1/models", "/openapi.json", "/", "/load"):
                found = await setup.http.head(path, headers=_bearer(OPERATOR))
                same = await setup.http.get(path, headers=_bearer(OPERATOR))
                assert found.status_code == same.status_code == 200
                assert found.headers["content-length"] == same.headers["content-length"]
            for path, status in (("/none", 404), ("/v1/completions", 405)):
                found = await setup.http.head(path, headers=_bearer(OPERATOR))
                assert found.status_code == status

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


def test_a_gateway_says_whose_its_requests_are(caplog: pytest.LogCaptureFixture) -> None:
    """The router is told, by hashes; others may not say it."""

    async def scenario() -> None:
        async with guarded() as (setup, _, rejects):

            async def send(key: str, *ids: str) -> httpx.Response:
                headers = [*_bearer(key).items(), *((FAIRNESS, value) for value in ids)]
                return await setup.http.post("/v1/completions", json=COMPLETION, headers=headers)

            for key, ids in ((GATE, ["one"]), (GATE, ["two"]), (GATE, []), (ALICE, [])):
                assert (await send(key, *ids)).status_code == 200
            clients = [submit.client for submit in setup.router.submits]
            assert len(set(clients)) == 4
            gate = clients[0].key
            assert [client.key == gate for client in clients] == [True, True, True, False]
            assert [bool(client.fairness_id) for client in clients] == [True, True, False, False]
            assert (clients[0].requests_per_minute, clients[0].tokens_per_minute) == (7, 9)
            assert (clients[3].requests_per_minute, clients[3].tokens_per_minute) == (0, 0)
            assert all("one" not in text for text in (gate, clients[0].fairness_id))
            salts = {submit.prefix_salt for submit in setup.router.submits}
            assert len(salts) == 2
            for key, ids, code in (
                (ALICE, ["one"], "gateway_key_required"),
                (OPERATOR, ["one"], "gateway_key_required"),
                (GATE, ["one", "two"], "invalid_value"),
                (GATE, [""], "invalid_value"),
                (GATE, ["x" * 129], "invalid_value"),
                (GATE, ["a b"], "invalid_value"),
            ):
                response = await send(key, *ids)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, FAIRNESS), (key, ids)
                assert error["code"] == code
            assert len(setup.router.submits) == 4 and rejects["gateway_key_required"] == 2
        async with frontend(says([5, 2])) as setup:
            headers = {FAIRNESS: "one"}
            response = await setup.http.post("/v1/completions", json=COMPLETION, headers=headers)
            assert response.json()["error"]["code"] == "gateway_key_required"

    with caplog.at_level("DEBUG"):
        asyncio.run(scenario())
    assert "one" not in [word for record in caplog.records for word in record.getMessage().split()]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ErrorCode.REQUEST_QUOTA, "7 requests per minute"),
        (ErrorCode.TOKEN_QUOTA, "9 tokens per minute"),
    ],
)
def test_a_key_beyond_its_quota_is_told_so(error: ErrorCode, said: str) -> None:
    def refuses(submit: Submit) -> list[RequestDelta]:
        number = submit.request_id
        return [RequestDelta(number, [], FinishReason.ERROR, error, retry_after_s=12.3)]

    async def scenario() -> None:
        async with guarded() as (setup, _, _):
            setup.router.answer = refuses
            body = {**COMPLETION, "n": 2}
            response = await setup.http.post("/v1/completions", json=body, headers=_bearer(GATE))
            assert response.status_code == 429 and response.headers["retry-after"] == "13"
            detail = response.json()["error"]
            assert detail["code"] == "rate_limit_exceeded" and said in detail["message"]
            assert detail["type"] == "rate_limit_error"
            assert [submit.is_first for submit in setup.router.submits] == [True, False]

    asyncio.run(scenario())


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
                    error = response.json()["error"]
                    assert error["code"] == "invalid_host"
                    assert "--allowed-hosts" in error["message"]

    asyncio.run(scenario())


PAGES: list[tuple[dict[str, str], bool]] = [
    ({"origin": "http://evil.example"}, False),
    ({"origin": "null"}, False),
    ({"origin": ""}, False),
    ({"origin": "http://localhost:3000"}, False),
    ({"origin": "http://localhost"}, True),
    ({"sec-fetch-site": "cross-site"}, False),
    ({"sec-fetch-site": "same-site"}, False),
    ({"sec-fetch-site": "same-origin", "origin": "http://localhost"}, True),
    ({"sec-fetch-site": "none"}, True),
    ({"sec-fetch-site": "cross-site", "origin": "https://chat.example"}, False),
    ({}, True),
]


def test_pages_of_other_origins_are_refused_where_there_are_no_keys() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for headers, passes in PAGES:
                for method, path in (("POST", "/v1/completions"), ("GET", "/livez")):
                    response = await setup.http.request(
                        method, path, headers=headers, json=COMPLETION
                    )
                    assert response.status_code == (200 if passes else 403), headers
                    if not passes:
                        assert response.json()["error"]["code"] == "foreign_origin"
            assert len(setup.router.submits) == sum(passes for _, passes in PAGES)
            both = [("origin", "http://localhost")] * 2
            assert (await setup.http.get("/livez", headers=both)).status_code == 403
        async with guarded() as (setup, _, _):  # a key is what a page does not have
            for headers, _ in PAGES:
                response = await setup.http.get("/v1/models", headers=headers | _bearer(ALICE))
                assert response.status_code == 200

    asyncio.run(scenario())


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


def test_allowed_origins_may_ask_and_read() -> None:
    origin = "https://chat.example"

    async def scenario(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
        asked = await http.options("/v1/completions", headers={"origin": origin} | PREFLIGHT)
        assert (asked.status_code, asked.content) == (204, b"")
        assert asked.headers["access-control-allow-origin"] == origin
        assert "POST" in asked.headers["access-control-allow-methods"]
        wanted = PREFLIGHT["access-control-request-headers"]
        assert asked.headers["access-control-allow-headers"] == wanted
        page = {"origin": origin, "sec-fetch-site": "cross-site"}
        for path, status in (("/v1/models", 200), ("/none", 404)):
            answer = await http.get(path, headers=page | headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "Origin"
        for other in ("https://evil.example", "https://chat.example.evil", "null"):
            for more in ({}, PREFLIGHT):
                answer = await http.options("/v1/completions", headers={"origin": other} | more)
                assert answer.status_code in (401, 403)
                assert "access-control-allow-origin" not in answer.headers

    async def with_and_without_keys() -> None:
        async with frontend(allowed_origins=f"http://a.example, {origin}") as setup:
            await scenario(setup.http, {})
        async with guarded(allowed_origins=origin) as (setup, _, _):
            await scenario(setup.http, _bearer(ALICE))
            answer = await setup.http.get("/v1/models", headers={"origin": origin})
            assert answer.status_code == 401  # and the page may read why
            assert answer.headers["access-control-allow-origin"] == origin
        async with guarded(allowed_origins="*") as (setup, _, _):
            answer = await setup.http.options(
                "/generate", headers={"origin": "http://any.example"} | PREFLIGHT
            )
            assert answer.headers["access-control-allow-origin"] == "http://any.example"

    asyncio.run(with_and_without_keys())


@pytest.mark.parametrize(
    ("origins", "complaint"),
    [
        ("*", "needs --api-key-file"),
        (",", "at least one name"),
        ("chat.example", "got 'chat.example'"),
        ("https://chat.example/", "without a path"),
        ("HTTPS://chat.example", "small letters"),
        ("null", "got 'null'"),
    ],
)
def test_what_is_no_origin(origins: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        ServeConfig(allowed_origins=origins)


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonx",
        "application/json, text/plain",
    ],
)
def test_a_body_says_that_it_is_json(given: str | None) -> None:
    """A page may have a browser send any of these to another origin without asking first."""
    bodies = {
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": {},
        "/generate": {"inputs": "hi"},
        "/generate_stream": {"inputs": "hi"},
        "/tokenize": {"inputs": "hi"},
        "/detokenize": {"tokens": [5]},
    }

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            setup.http.headers.pop("content-type")
            headers = {} if given is None else {"content-type": given}
            for path, body in bodies.items():
                content = json.dumps(body).encode()
                response = await setup.http.post(path, content=content, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
                assert "Content-Type: application/json" in error["message"]
            assert not setup.router.submits
            for good in ("application/json", "Application/JSON; charset=utf-8"):
                content = json.dumps(COMPLETION).encode()
                response = await setup.http.post(
                    "/v1/completions", content=content, headers={"content-type": good}
                )
                assert response.status_code == 200

    asyncio.run(scenario())


def test_no_cors_and_no_server_name() -> None:
    async def scenario() -> None:
        async with guarded() as (setup, _, _):
            headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
            for method in ("OPTIONS", "GET", "POST"):
                response = await setup.http.request(method, "/v1/models", headers=headers)
                names = set(response.headers)
                assert not {name for name in names if name.startswith("access-control")}
                assert not {"server", "x-powered-by"} & names

    asyncio.run(scenario())


def test_the_root_says_what_this_is() -> None:
    async def scenario() -> None:
        for flags in ({}, {"enable_docs": True}):
            async with frontend(**flags) as setup:
                answer = (await setup.http.get("/")).json()
                assert answer["server"] == "lightserve"
                assert answer["model"] == BUNDLED_MODEL_NAME
                for name in ("openapi", "docs"):
                    if name in answer:
                        assert (await setup.http.get(answer[name])).status_code == 200
                assert ("docs" in answer) == bool(flags)

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
