"""Import paths that documentation once named, and that have moved: they still work, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "kvcomm_integrations.engines.base": "kvcomm_integrations.engines.interface",
    "kvcomm_integrations.engines.chat": "kvcomm_integrations.chat.runtime",
    "kvcomm_integrations.engines.runs": "kvcomm_integrations.chat.request_log",
    "kvcomm_integrations.engines.shared": "kvcomm_integrations.engines.registry",
}
"""Former module to where its names are now."""


class _Alias(Loader):
    """Gives the module a former name stands for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MOVED[spec.name])
        warnings.warn(f"{spec.name} has moved to {module.__name__}; import it from there", DeprecationWarning, 3)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it has run already, under its own name


class _Finder(MetaPathFinder):
    """Answers for former names, after everybody else."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Alias()) if name in MOVED else None


def keep_former_names() -> None:
    """Have former names found. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
