"""The compiler that Triton asks a backend for; the interpreter never calls it."""

from __future__ import annotations

from typing import Any

from triton.backends import compiler


class StandInCompiler(compiler.BaseBackend):
    """Refuses to compile."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "stand-in"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("this backend is for Triton's interpreter: set TRITON_INTERPRET=1")

    parse_options = add_stages = load_dialects = get_module_map = _refuse


StandInCompiler.__abstractmethods__ = frozenset()
