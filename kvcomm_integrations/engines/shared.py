"""Engines by configuration: chat models with equal settings share one, and all are shut down at exit."""

from __future__ import annotations

import atexit
import os
import threading

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.base import Engine

_lock = threading.Lock()
_engines: dict[str, Engine] = {}


def get_engine(config: EngineConfig) -> Engine:
    """The engine for a configuration, made on first use; nothing is started yet.

    Raises:
        ConfigurationError: ``base_url`` is not an address.
    """
    with _lock:
        engine = _engines.get(config.key())
        if engine is None or getattr(engine, "closed", False):
            engine = _make(config)
            _engines[config.key()] = engine
        return engine


def close_engines() -> None:
    """Shut down every shared engine and wait until its processes are gone. Runs at exit by itself."""
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.close()


def _make(config: EngineConfig) -> Engine:
    if config.base_url is not None:
        from kvcomm_integrations.engines.http.engine import HttpEngine

        return HttpEngine(config)
    from kvcomm_integrations.engines.inprocess import InProcessEngine

    return InProcessEngine(config)


def _after_fork() -> None:
    """In a forked child: a lock that no thread of the parent holds. The engines see to themselves."""
    global _lock
    _lock = threading.Lock()


atexit.register(close_engines)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
