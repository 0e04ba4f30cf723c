"""Who may use which route where there are tenants, and that the list of routes is complete and documented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.serve.middleware import KVCommMiddleware
from kvcomm_integrations.serve.names import FOLDER_VARIABLE, HEADER_VARIABLE, KEY_VARIABLE, KEYS_VARIABLE
from kvcomm_integrations.serve.routes import ROUTES, Access, access_to
from kvcomm_integrations.wire import INFO_PATH
from tests.server.test_tenants import KEYS, Client, Server, bearer

ROOT = Path(__file__).parents[2]
OPERATOR = "the operator's own key"
DOCUMENTED = {
    ("yes, and anybody", "yes"): Access.OPEN,
    ("yes", "yes"): Access.TENANT,
    ("yes, own media", "yes"): Access.MEDIA,
    ("yes, own cache", "no"): Access.SALTED,
    ("own only", "no"): Access.OWNED,
    ("no", "yes"): Access.OPERATOR,
}
"""What ``docs/security.md`` says of tenant and operator."""


def documented() -> list[tuple[str, Access]]:
    """Rows of ``docs/security.md``: | routes | tenant | operator |."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[A-Z]+ /.*) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return [
        (name, DOCUMENTED[tenant, operator])
        for names, tenant, operator in rows
        for name in re.findall("`([^`]+)`", names)
    ]


EVERY = documented()
"""Every route of vLLM's server."""
TENANTS_MAY = (Access.OPEN, Access.TENANT, Access.MEDIA, Access.SALTED, Access.OWNED)


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    monkeypatch.setenv(KEYS_VARIABLE, str(path))
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    return Server()


async def ask(server: Server, name: str, **headers: str) -> int:
    """The status of one request; 0 for a websocket that was let through, 403 for one that was closed."""
    method, path = re.sub(r"{\w+}", "some", name).split(" ")
    if method != "WEBSOCKET":
        return (await server.ask(method, path, {} if method == "POST" else None, **headers))[0]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    await server.middleware(scope, None, send)  # type: ignore[arg-type]
    return 403 if sent else 0


@pytest.mark.parametrize(("name", "access"), EVERY, ids=[name for name, _ in EVERY])
async def test_each_route_serves_whom_it_is_for(keyed: Server, name: str, access: Access) -> None:
    websocket = name.startswith("WEBSOCKET")
    served = 0 if websocket else 200
    assert await ask(keyed, name) == (served if access is Access.OPEN else 403 if websocket else 401)
    assert await ask(keyed, name, **bearer("wrong")) == (served if access is Access.OPEN else 403 if websocket else 401)
    assert await ask(keyed, name, **bearer("key-a")) == (served if access in TENANTS_MAY else 403)
    content = access in (Access.SALTED, Access.OWNED)
    assert await ask(keyed, name, **bearer(OPERATOR)) == (401 if content else served)


@pytest.mark.parametrize(
    "name",
    [
        "POST /v1/files", "GET /v1/files/{id}", "POST /v1/batches", "DELETE /v1/responses/{id}",
        "GET /v1/responses/{id}/input_items", "POST /v1/responses/{id}", "POST /v1/responses/", "GET /v1/responses",
        "GET /newer", "PUT /v1/completions", "POST /v1/completions/", "POST //v1/completions", "POST /sleep\n",
        "GET /metrics/", "GET /health/x", "POST /v1/chat/completions/newer",
    ],
)  # fmt: skip
async def test_what_the_list_does_not_name_is_not_for_tenants(keyed: Server, name: str) -> None:
    status, answer = await keyed.ask(*re.sub(r"{\w+}", "some", name).split(" "), **bearer("key-a"))  # type: ignore[arg-type]
    assert status == 403
    assert re.sub(r"{\w+}", "some", name) in json.loads(answer)["error"]["message"]
    assert await ask(keyed, name) == 401
    assert await ask(keyed, name, **bearer(OPERATOR)) == 200


async def test_without_an_operators_key_nobody_is_the_operator(keyed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    server = Server()
    for shown in ({}, bearer(""), {"authorization": "Bearer"}, bearer("key-a")):
        assert await ask(server, "POST /collective_rpc", **shown) in (401, 403)


async def test_behind_a_proxy_the_tenants_header_does_not_make_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    server = Server()
    assert await ask(server, "GET /v1/models") == 200
    assert await ask(server, "GET /metrics", x_tenant="a") == 403
    assert await ask(server, "GET /metrics", **bearer(OPERATOR)) == 200
    assert await ask(server, "POST /v1/completions", x_tenant="a", **bearer(OPERATOR)) == 200


async def test_without_tenants_every_route_is_vllms() -> None:
    server = Server()
    for name, access in EVERY:
        if not name.startswith("WEBSOCKET") and access is not Access.TENANT:
            assert await ask(server, name) == 200, name
    assert await ask(server, "POST /newer") == 200


def test_the_operators_key_is_none_of_the_tenants(keyed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key-b")
    with pytest.raises(ConfigurationError, match="entry 3: the key is the operator's"):
        Server()
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="at least 16 characters"):
        Server()


# ---- the list -------------------------------------------------------------------------------------------------------


def test_the_documentation_holds_the_same_list() -> None:
    assert len(EVERY) == len(dict(EVERY)) > 70
    allowed = {name: access for name, access in EVERY if access is not Access.OPERATOR}
    assert allowed == {name: access for access, names in ROUTES.items() for name in names}
    for name, access in EVERY:
        method, path = re.sub(r"{\w+}", "some", name).split(" ")
        assert access_to(method, path) is access, name


@pytest.mark.engine
def test_the_list_names_every_route_of_vllms_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation's list, and the server with everything switched on. A newer vLLM's new route shows here."""
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.profile.api_router import router as profile
    from vllm.tasks import FRONTEND_TASKS, GENERATION_TASKS, POOLING_TASKS
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    switches = ["--enable-tokenizer-info-endpoint", "--enable-fault-tolerance", "--enable-scale-out"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(switches)
    model: Any = SimpleNamespace(get_pooling_task=lambda tasks: "embed")
    app = build_app(args, (*GENERATION_TASKS, *POOLING_TASKS, *FRONTEND_TASKS), model)
    app.include_router(profile)
    found = set()
    for route in app.routes:
        methods = getattr(route, "methods", None) or ({"WEBSOCKET"} if "WebSocket" in type(route).__name__ else {"GET"})
        found |= {f"{method} {route.path}" for method in methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert len(found) > 70
    assert found - {name for name, _ in EVERY} == set()


# ---- CORS -----------------------------------------------------------------------------------------------------------

SITE = "https://app.example"


@pytest.fixture
def browser(keyed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Middleware in vLLM's order: its CORS middleware inside, ours outermost."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"data": []})

    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/v1/models", "/v1/completions")]
    cors = Middleware(CORSMiddleware, allow_origins=[SITE], allow_credentials=True, allow_methods=["*"])
    app = Starlette(routes=routes, middleware=[Middleware(KVCommMiddleware), cors])
    app.state.engine_client = Client()
    return TestClient(app, headers={"origin": SITE})


def test_our_own_answers_have_the_cors_headers_of_vllms(browser: TestClient) -> None:
    key = bearer("key-a")
    vllms = browser.get("/v1/models", headers=key)
    ours = {
        401: browser.post("/v1/completions", json={}),
        403: browser.post("/sleep", headers=key),
        400: browser.post("/v1/completions", content=b"{", headers=key),
        200: browser.get(INFO_PATH, headers=key),
        404: browser.post("/kvcomm/state/steal", headers=bearer(OPERATOR)),
    }
    names = ("access-control-allow-origin", "access-control-allow-credentials", "vary")
    expected = [vllms.headers.get_list(name) for name in names]
    assert expected[0] == [SITE]
    for status, answer in ours.items():
        assert answer.status_code == status
        assert [answer.headers.get_list(name) for name in names] == expected


def test_other_sites_get_none(browser: TestClient) -> None:
    for answer in (browser.post("/sleep", headers={"origin": "https://other"}), browser.get("/v1/models")):
        if answer.request.headers["origin"] != SITE:
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/completions", INFO_PATH, "/v1/responses/some/cancel", "/sleep", "/newer"])
def test_preflights_are_answered_by_vllms_cors_middleware(browser: TestClient, path: str) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    answer = browser.options(path, headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == SITE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert browser.options(path, headers={**asks, "origin": "https://other"}).status_code == 400


def test_the_live_page_stays_with_its_own_site(
    keyed: Server, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser on the server's machine may read the page, but no other site's scripts in it."""
    monkeypatch.setenv("KVCOMM_LIVE", "1")
    answer = browser.get("http://127.0.0.1:8000/kvcomm")
    assert "access-control-allow-origin" not in answer.headers


def test_lookups() -> None:
    assert access_to("HEAD", "/health") is Access.OPEN
    assert access_to("GET", "/v1/responses/a/b") is Access.OPERATOR
    assert access_to("GET", "/v1/responses/{response_id}") is Access.OWNED
