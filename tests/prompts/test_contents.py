from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvcomm_integrations.prompts import ContentRegistry, Origin, content_id, response_name

from .conversations import ANSWER, CODE, QUESTION


def names(registry: ContentRegistry, session: str = "s") -> list[str]:
    return [c.name for c in registry.contents(session)]


def test_register_and_look_up(registry: ContentRegistry) -> None:
    content = registry.register("s", "user_question", f" {QUESTION}\n")
    assert registry.lookup("s", content.id) is content
    assert registry.find_text("s", QUESTION) is content
    assert content.text == f" {QUESTION}\n" and content.core == QUESTION and content.token_ids == ()
    assert registry.register("s", "user_question", f" {QUESTION}\n") is content
    assert registry.lookup("s", "nothing") is None and registry.find_text("s", "nothing") is None


def test_responses_keep_their_ids(registry: ContentRegistry) -> None:
    content = registry.register_response("s", "coder", ANSWER, [5, 6, 7])
    assert content.name == response_name("coder") == "agent:coder:response"
    assert content.token_ids == (5, 6, 7) and content.origin is Origin.GENERATED


def test_sessions_are_isolated(registry: ContentRegistry) -> None:
    content = registry.register("one", "n", QUESTION)
    assert registry.lookup("two", content.id) is None
    assert registry.find_text("two", QUESTION) is None
    assert not registry.search("two", QUESTION, 0, len(QUESTION), lambda c: True)
    assert not registry.search_parts("two", QUESTION, 0, len(QUESTION))
    assert registry.contents("two") == () and len(registry) == 1
    registry.release("one")
    registry.release("never seen")
    assert registry.lookup("one", content.id) is None and registry.bytes == 0 and len(registry) == 0


def test_equal_texts_of_different_names(registry: ContentRegistry) -> None:
    coder = registry.register_response("s", "coder", ANSWER, [1])
    critic = registry.register_response("s", "critic", ANSWER, [1])
    assert coder.id != critic.id
    assert registry.find_text("s", ANSWER, coder.name) is coder
    assert registry.find_text("s", ANSWER, critic.name) is critic
    assert registry.find_text("s", ANSWER, "other") is critic


def test_contents_are_bounded_by_count() -> None:
    registry = ContentRegistry(max_contents=3)
    kept = registry.register("s", "0", f"{QUESTION} 0")
    for i in range(1, 5):
        registry.register("s", str(i), f"{QUESTION} {i}")
        registry.lookup("s", kept.id)
    assert sorted(names(registry)) == ["0", "3", "4"]
    assert registry.find_text("s", f"{QUESTION} 1") is None
    text = f"- {QUESTION} 1\n- {QUESTION} 4"
    assert [m.content.name for m in registry.search("s", text, 0, len(text), lambda c: True)] == ["4"]


def test_contents_are_bounded_by_bytes() -> None:
    registry = ContentRegistry(max_session_bytes=100_000)
    for i in range(50):
        registry.register("s", str(i), f"{i} {CODE}" * 20, list(range(500)))
    assert 0 < len(names(registry)) < 50 and names(registry)[-1] == "49"
    assert 0 < registry.bytes <= 100_000
    huge = registry.register("s", "huge", "x" * 200_000)
    assert huge.text and registry.lookup("s", huge.id) is None


def test_sessions_are_bounded_by_count_and_bytes() -> None:
    registry = ContentRegistry(max_sessions=3)
    for i in range(6):
        registry.register(str(i), "n", QUESTION)
        registry.find_text("0", QUESTION)
    assert len(registry) == 3 and registry.contents("0") and not registry.contents("1")
    registry = ContentRegistry(max_bytes=40_000)
    for i in range(50):
        registry.register(str(i), "n", CODE)
    assert 0 < len(registry) < 50 and registry.bytes <= 40_000 and registry.contents("49")
    assert registry.bytes == sum(registry._sessions[s].bytes for s in registry._sessions)


def test_nothing_is_kept_of_nothing(registry: ContentRegistry) -> None:
    registry.register("s", "n", " \n")
    assert registry.contents("s") == ()


def test_surrogates_are_cleaned(registry: ContentRegistry) -> None:
    assert registry.register("s", "n", "half \ud83d").text == "half \ufffd"


def test_layouts_are_remembered_until_a_content_goes() -> None:
    registry = ContentRegistry(max_contents=2)
    content = registry.register("s", "n", QUESTION)
    registry.remember_layout("s", "key", [(1, 2, content)])
    assert registry.layout("s", "key") == ((1, 2, content),)
    assert registry.layout("s", "other") is None and registry.layout("t", "key") is None
    registry.register("s", "a", ANSWER)
    registry.register("s", "b", CODE)
    assert registry.layout("s", "key") is None
    for i in range(100):
        registry.remember_layout("s", i, [])
    assert len(registry._sessions["s"].layouts) <= 8


def test_content_id() -> None:
    assert content_id([1, 2]) == content_id((1, 2))
    different = [content_id([1, 2]), content_id([12]), content_id([2, 1]), content_id([1, 2], "m"), content_id([])]
    different += [content_id([1, 2], "m", "n"), content_id([1, 2], "mn"), content_id([1, 2], "n", "m")]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_ids_are_the_same_in_every_process(registry: ContentRegistry, seed: str) -> None:
    code = (
        "from kvcomm_integrations.prompts import ContentRegistry, content_id\n"
        "r = ContentRegistry()\n"
        "print(content_id([1, 2, 70000], 'model', 'tenant'), r.register('s', 'n', 'tëxt').id,"
        " r.register_response('t', 'a', 'x', [3]).id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    want = [content_id([1, 2, 70000], "model", "tenant"), registry.register("z", "n", "tëxt").id]
    assert done.stdout.split() == [*want, registry.register_response("y", "a", "x", [3]).id]


def test_threads() -> None:
    registry = ContentRegistry(max_sessions=4, max_contents=20)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(150):
                session = str((number + i) % 6)
                content = registry.register(session, str(i), f"{QUESTION} {i % 30}")
                registry.lookup(session, content.id)
                registry.search(session, content.text, 0, len(content.text), lambda c: True)
                registry.layout(session, i)
                registry.remember_layout(session, i, [(0, 1, content)])
                if i % 40 == 0:
                    registry.release(session)
        except BaseException as err:  # noqa: BLE001
            failures.append(err)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(registry) <= 4
    assert registry.bytes == sum(state.bytes for state in registry._sessions.values())
