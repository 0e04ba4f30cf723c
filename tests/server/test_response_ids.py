"""Stored responses and named media belong to the tenant that made them. With a stand-in for vLLM's stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcomm_integrations.serve.middleware import KVCommMiddleware
from kvcomm_integrations.serve.names import HEADER_VARIABLE, KEYS_VARIABLE
from tests.server.test_tenants import KEYS, Server, bearer

A, B = bearer("key-a"), bearer("key-b")


class Store(Server):
    """The middleware before what vLLM's responses routes do: one store for all, ids from bodies, media by name."""

    def __init__(self, stored: dict[str, dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.middleware = KVCommMiddleware(self._vllm)
        self.stored = {} if stored is None else stored
        self.queries: list[bytes] = []

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        raw = (await receive()).get("body", b"")
        prefix = scope["root_path"] + "/v1/responses"
        assert scope["path"].startswith(prefix), scope["path"]
        assert scope.get("raw_path", scope["path"].encode()).decode() == scope["path"]
        if scope["path"] == prefix:
            body = json.loads(raw)
            self.app.bodies.append(body)
            before = body.get("previous_response_id")
            if before is not None and before not in self.stored:
                await self._answer(send, 404, {"error": f"Response with id '{before}' not found."})
                return
            text = self.stored[before]["text"] + body["input"] if before else body["input"]
            self.stored[body["request_id"]] = {"id": body["request_id"], "text": text, "status": "queued"}
            await self._answer(send, 200, self.stored[body["request_id"]])
            return
        self.queries.append(scope.get("query_string", b""))
        name = scope["path"].removeprefix(prefix + "/")
        found = self.stored.get(name.removesuffix("/cancel"))
        if found is None:
            await self._answer(send, 404, {"error": f"Response with id '{name.removesuffix('/cancel')}' not found."})
            return
        if name.endswith("/cancel"):
            found["status"] = "cancelled"
        await self._answer(send, 200, found)

    async def _answer(self, send: Any, status: int, content: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def make(self, key: dict[str, str], text: str, **fields: Any) -> str:
        status, answer = await self.ask("POST", "/v1/responses", {"input": text, **fields}, **key)
        assert status == 200, answer
        return str(json.loads(answer)["id"])

    async def read(self, key: dict[str, str], name: str) -> tuple[int, Any]:
        status, answer = await self.ask("GET", f"/v1/responses/{name}", **key)
        return status, json.loads(answer)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    monkeypatch.setenv(KEYS_VARIABLE, str(path))
    return Store()


@pytest.mark.parametrize("chosen", [{}, {"request_id": "mine"}, {"request_id": "resp_1"}])
async def test_only_the_tenant_that_made_a_response_can_use_it(store: Store, chosen: dict[str, str]) -> None:
    made = await store.make(A, "of A", **chosen)
    for name in (made, *chosen.values()):
        assert (await store.read(A, name))[1]["text"] == "of A"
        assert (await store.read(bearer("key-a2"), name))[0] == 200  # another key of the same tenant
        assert (await store.read(B, name))[0] == 404
        assert (await store.ask("POST", f"/v1/responses/{name}/cancel", **B))[0] == 404
        assert (await store.read(A, name))[1]["status"] == "queued"
        follow = {"input": " more", "previous_response_id": name}
        assert (await store.ask("POST", "/v1/responses", follow, **B))[0] == 404
        status, answer = await store.ask("POST", "/v1/responses", follow, **A)
        assert (status, json.loads(answer)["text"]) == (200, "of A more")
    assert (await store.ask("POST", f"/v1/responses/{made}/cancel", **A))[0] == 200
    assert (await store.read(A, made))[1]["status"] == "cancelled"


async def test_two_tenants_may_choose_the_same_id(store: Store) -> None:
    of_a, of_b = await store.make(A, "a", request_id="x"), await store.make(B, "b", request_id="x")
    assert of_a != of_b
    for key, text in ((A, "a"), (B, "b")):
        assert (await store.read(key, "x"))[1]["text"] == text


async def test_a_chosen_id_cannot_imitate_another_tenants(store: Store) -> None:
    made = await store.make(A, "a", request_id="x")
    imitated = await store.make(B, "b", request_id=made)
    assert imitated != made
    assert (await store.read(A, made))[1]["text"] == "a"
    assert (await store.read(B, made))[1]["text"] == "b"  # what B calls so


async def test_an_answer_does_not_tell_whether_another_tenant_has_the_id(store: Store) -> None:
    await store.make(A, "a", request_id="x")
    taken, free = await store.read(B, "x"), await store.read(B, "y")
    assert taken[0] == free[0] == 404
    assert taken[1]["error"].replace("_x'", "") == free[1]["error"].replace("_y'", "")


async def test_ownership_survives_the_process_and_needs_no_memory(store: Store) -> None:
    made = await store.make(A, "a")
    restarted = Store(store.stored)
    assert (await restarted.read(A, made))[0] == 200
    assert (await restarted.read(B, made))[0] == 404


async def test_a_stream_of_a_stored_response_is_its_tenants_too(store: Store) -> None:
    made = await store.make(A, "a", background=True, stream=True)
    query = b"stream=true&starting_after=3"
    assert (await store.ask("GET", f"/v1/responses/{made}", query=query, **A))[0] == 200
    assert (await store.ask("GET", f"/v1/responses/{made}", query=query, **B))[0] == 404
    assert store.queries == [query, query]


@pytest.mark.parametrize("field", ["request_id", "previous_response_id"])
@pytest.mark.parametrize("value", [5, ["x"], {"x": 1}, True])
async def test_ids_are_strings(store: Store, field: str, value: Any) -> None:
    status, answer = await store.ask("POST", "/v1/responses", {"input": "x", field: value}, **A)
    assert status == 400
    assert field in json.loads(answer)["error"]["message"]
    assert store.stored == {}


async def test_a_trusted_header_owns_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    store = Store()
    made = await store.make({"x_tenant": "a"}, "a")
    assert (await store.read({"x_tenant": "a"}, made))[0] == 200
    assert (await store.read({"x_tenant": "b"}, made))[0] == 404
    assert (await store.read({}, made))[0] == 401


async def test_behind_a_root_path(store: Store) -> None:
    made = await store.make(A, "a")
    for key, status in ((A, 200), (B, 404)):
        found, _ = await store.ask("GET", f"/proxy/v1/responses/{made}", root_path="/proxy", **key)
        assert found == status


async def test_without_tenants_ids_are_left_alone() -> None:
    store = Store()
    assert await store.make({}, "x", request_id="mine") == "mine"
    assert (await store.read({}, "mine"))[0] == 200


# ---- media ----------------------------------------------------------------------------------------------------------


def picture(name: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None, "uuid": name}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_name_of_media_reaches_its_own_tenants_only(store: Store, path: str) -> None:
    """vLLM keeps images by the ``uuid`` that clients give them, and serves a request that has the name only."""
    server = Server()
    seen = []
    for key in (A, A, B):
        content = [{"type": "text", "text": "What is it?"}, picture("logo"), picture(7)]
        await server.ask("POST", path, {"messages": [{"role": "user", "content": content}]}, **key)
        parts = server.app.bodies[-1]["messages"][0]["content"]
        assert "uuid" not in parts[0]
        seen.append([part["uuid"] for part in parts[1:]])
    assert seen[0] == seen[1]
    assert len({*seen[0], *seen[2], "logo", "7", 7}) == 7


async def test_media_of_responses_and_of_a_divided_tenant(store: Store) -> None:
    names = set()
    for said in (None, "user-1", "user-2"):
        body: dict[str, Any] = {"input": [{"content": [picture("logo")]}, {"output": [picture("logo")]}]}
        if said:
            body["kv_transfer_params"] = {"kvcomm": {"tenant": said}}
        server = Server()
        await server.ask("POST", "/v1/responses", body, **A)
        first, second = server.app.bodies[-1]["input"]
        assert first["content"] == second["output"]
        names.add(first["content"][0]["uuid"])
    assert len(names) == 3


@pytest.mark.parametrize("messages", [5, [5], [{"content": "x"}], [{"content": [5, {"uuid": None}]}], None])
async def test_bodies_of_another_form_are_left_to_vllm(store: Store, messages: Any) -> None:
    server = Server()
    assert (await server.ask("POST", "/tokenize", {"messages": messages}, **A))[0] == 200
    assert server.app.bodies == [{"messages": messages}]


async def test_a_body_too_deep_to_read_is_refused(store: Store) -> None:
    raw = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert (await store.ask("POST", "/v1/responses", raw=raw, **A))[0] == 400
