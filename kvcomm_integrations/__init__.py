"""KVCOMM on vLLM for LangGraph and AutoGen: agents of one local model share the KV cache of what they all read.

Importing this package is cheap: every name below is loaded on first use, so neither torch, vLLM nor an agent framework
is imported before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcomm_integrations._moved import keep_former_names
from kvcomm_integrations._version import __version__

if TYPE_CHECKING:
    from kvcomm_integrations.autogen import KVCommChatCompletionClient
    from kvcomm_integrations.config import EngineConfig, Isolation, ReuseConfig, Tokenization
    from kvcomm_integrations.errors import KVCommError, MissingDependencyError
    from kvcomm_integrations.langchain import ChatKVComm
    from kvcomm_integrations.wire import Mode, RequestReport, SegmentReport


__all__ = [
    "ChatKVComm",
    "EngineConfig",
    "Isolation",
    "KVCommChatCompletionClient",
    "KVCommError",
    "MissingDependencyError",
    "Mode",
    "RequestReport",
    "ReuseConfig",
    "SegmentReport",
    "Tokenization",
    "__version__",
]

_HOME = {
    "ChatKVComm": "langchain",
    "EngineConfig": "config",
    "Isolation": "config",
    "KVCommChatCompletionClient": "autogen",
    "KVCommError": "errors",
    "MissingDependencyError": "errors",
    "Mode": "wire",
    "RequestReport": "wire",
    "ReuseConfig": "config",
    "SegmentReport": "wire",
    "Tokenization": "config",
}
"""Module of this package in which a public name lives."""

_EXTRA = {
    "autogen_agentchat": "autogen",
    "autogen_core": "autogen",
    "langchain_core": "langgraph",
    "langgraph": "langgraph",
    "torch": "vllm",
    "transformers": "vllm",
    "vllm": "vllm",
}
"""Extra that brings an optional package."""

keep_former_names()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as err:
        package = (err.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        from kvcomm_integrations.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} needs the package {package!r}, which is not installed: "
            f"pip install 'kvcomm-integrations[{_EXTRA[package]}]'",
            name=package,
        ) from err
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
