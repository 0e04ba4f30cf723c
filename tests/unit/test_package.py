"""Importing the package is cheap, and a missing extra is named."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import kvcomm_integrations
from kvcomm_integrations import MissingDependencyError, config, errors, wire
from kvcomm_integrations._moved import MOVED

HEAVY = ("torch", "transformers", "vllm", "langchain_core", "langgraph", "autogen_core", "autogen_agentchat")
PROBE = f"""
import json, sys, time
start = time.perf_counter()
import kvcomm_integrations
import kvcomm_integrations.cli
from kvcomm_integrations import EngineConfig, ReuseConfig, RequestReport
seconds = time.perf_counter() - start
print(json.dumps(dict(seconds=seconds, heavy=[name for name in {HEAVY!r} if name in sys.modules])))
"""


def test_importing_is_cheap() -> None:
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", PROBE], timeout=60)) for _ in range(2)]
    assert [run["heavy"] for run in runs] == [[], []]
    assert min(run["seconds"] for run in runs) < 1.0


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("EngineConfig", config),
        ("ReuseConfig", config),
        ("Isolation", config),
        ("Tokenization", config),
        ("Mode", wire),
        ("RequestReport", wire),
        ("SegmentReport", wire),
        ("KVCommError", errors),
        ("MissingDependencyError", errors),
    ],
)
def test_public_names_are_the_real_ones(name: str, home: ModuleType) -> None:
    assert getattr(kvcomm_integrations, name) is getattr(home, name)


def test_dir_lists_every_public_name() -> None:
    assert set(kvcomm_integrations.__all__) <= set(dir(kvcomm_integrations))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ChatKVCom'"):
        _ = kvcomm_integrations.ChatKVCom


def fail_to_import(module: str) -> Callable[[str], ModuleType]:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    return import_module


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("ChatKVComm", "langchain_core.language_models", "langgraph"),
        ("KVCommChatCompletionClient", "autogen_core", "autogen"),
        ("ChatKVComm", "vllm", "vllm"),
    ],
)
def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str, missing: str, extra: str) -> None:
    monkeypatch.delitem(vars(kvcomm_integrations), name, raising=False)
    monkeypatch.setattr(kvcomm_integrations, "import_module", fail_to_import(missing))
    with pytest.raises(MissingDependencyError, match=rf"kvcomm-integrations\[{extra}\]") as caught:
        getattr(kvcomm_integrations, name)
    assert caught.value.name == missing.partition(".")[0]


def test_a_fault_of_our_own_is_not_taken_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(kvcomm_integrations), "ChatKVComm", raising=False)
    monkeypatch.setattr(kvcomm_integrations, "import_module", fail_to_import("kvcomm_integrations.langchain.typo"))
    with pytest.raises(ModuleNotFoundError, match="typo") as caught:
        _ = kvcomm_integrations.ChatKVComm
    assert not isinstance(caught.value, MissingDependencyError)


@pytest.mark.parametrize(("former", "now"), MOVED.items())
def test_former_import_paths_still_work_and_say_where_to_go(former: str, now: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"{former} has moved to {now}"):
        module = importlib.import_module(former)
    assert module is importlib.import_module(now) and module.__spec__ is not None and module.__spec__.name == now
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvcomm_integrations.engines.nothing")
