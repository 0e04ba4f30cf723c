"""What we rely on in vLLM: the list is complete, the check finds what is gone, and a user hears of it in one line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcomm_integrations
from kvcomm_integrations.connector import contract
from kvcomm_integrations.connector.contract import CHECKED_VLLM, FRONT_END, REUSE, SUPPORTED_VLLM, Need, Sources, needs

PACKAGE = Path(kvcomm_integrations.__file__).parent
PRIVATE_NAMES = ("compat.py", "workarounds.py")
ALL = REUSE + FRONT_END
TREE = {
    "vllm/__init__.py": '__version__ = "0.35.1"\n',
    "vllm/config/__init__.py": "from vllm.config.cache import CacheConfig as Cache\n",
    "vllm/config/cache.py": (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass CacheConfig:\n    dtype: str\n    size: int = 16\n"
        "    @property\n    def usable(self): ...\n"
    ),
    "vllm/base.py": (
        "if TYPE_CHECKING:\n    from vllm.config import Cache\n"
        "try:\n    import extra\nexcept ImportError:\n    extra = None\n"
        "class Base(Generic[T]):\n    def __init__(self, config: Cache) -> None:\n        self.config = config\n"
        "    def start(self, context, **kwargs): ...\n    @classmethod\n    def make(cls, *, data=None): ...\n"
    ),
    "vllm/runner.py": (
        "from vllm.base import Base\n"
        "class Runner(Base):\n    def load(self):\n        self.model: object = None\n        if self.model:\n"
        "            self.requests, other.groups = {}, []\n"
        "    def update(self, output):\n        report = output.report\n        return report\n"
        "    async def run(self, ids, positions=None): ...\n"
    ),
}
"""A made-up vLLM."""
NEEDS = needs("""\
vllm.config | sizes | Cache: dtype usable; Cache(dtype, size)
vllm.runner | repairs | Runner: config model requests; .update: report; .run(ids)
    ours Runner.start(context); ours .make(data); Runner(config)
""")


def write(folder: Path, old: str = "", new: str = "") -> Path:
    """The made-up vLLM in a folder, with one thing changed."""
    assert not old or any(old in text for text in TREE.values())
    for name, text in TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new) if old else text)
    return folder


def test_a_vllm_that_has_everything_lacks_nothing(tmp_path: Path) -> None:
    assert Sources(write(tmp_path)).missing(NEEDS) == []


@pytest.mark.parametrize(
    ("old", "new", "file", "gone"),
    [
        ("class Runner", "class Walker", "vllm/runner.py", {"Runner", "Runner.run", "Runner.start"}),
        ("import CacheConfig as Cache", "import CacheConfig", "vllm/config/__init__.py", {"Cache"}),
        ("self.model: object", "self.net: object", "vllm/runner.py", {"Runner.model"}),
        ("self.requests", "other.requests", "vllm/runner.py", {"Runner.requests"}),
        ("self.config = config", "pass", "vllm/runner.py", {"Runner.config"}),
        ("usable", "free", "vllm/config/__init__.py", {"Cache.usable"}),
        ("    size: int = 16\n", "", "vllm/config/__init__.py", {"Cache(size=)"}),
        ("size: int = 16", "size: int = 16\n    layers: int", "vllm/config/__init__.py", {"Cache without layers="}),
        ("report = output.report", "words = output.report", "vllm/runner.py", {"Runner.update.report"}),
        ("positions=None", "positions", "vllm/runner.py", {"Runner.run without positions="}),
        ("run(self, ids,", "run(self, tokens,", "vllm/runner.py", {"Runner.run(ids=)", "Runner.run without tokens="}),
        ("context, **", "context, step, **", "vllm/runner.py", {"Runner.start(context), it is (context, step)"}),
        ("*, data=None", "*, values=None", "vllm/runner.py", {"Runner.make(data), it is (values)"}),
        ("config: Cache)", "config: Cache, rank: int)", "vllm/runner.py", {"Runner without rank="}),
    ],
)
def test_what_is_gone_is_found(tmp_path: Path, old: str, new: str, file: str, gone: set[str]) -> None:
    missing = Sources(write(tmp_path, old, new)).missing(NEEDS)
    assert {where for where, _, _ in missing} == {file}
    assert gone <= {what for _, what, _ in missing}
    assert all(what.startswith(tuple(need.name for need in NEEDS)) for _, what, _ in missing)


def test_a_module_that_is_gone_is_found(tmp_path: Path) -> None:
    (write(tmp_path) / "vllm/runner.py").unlink()
    missing = Sources(tmp_path).missing(NEEDS)
    assert ("vllm/runner.py", "Runner", "repairs") in missing
    assert {file for file, _, _ in missing} == {"vllm/runner.py"}


def test_a_wheel_is_read_without_unpacking(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name, text in TREE.items():
            wheel.writestr(name, text)
    assert Sources(tmp_path / "vllm.whl").missing(NEEDS) == []


def test_the_command_prints_a_line_for_each_missing_thing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.main(str(write(tmp_path))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "vllm/v1/request.py: no RequestStatus (requests, and the block hashes that hide approximate blocks)" in lines
    assert len(lines) == 1 + len(ALL)


def test_the_installed_vllm_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (contract.main(), capsys.readouterr().out.count("\n")) == (0, 1)


# ---- the list cannot fall behind ---------------------------------------------------------------------------------


def private_imports(path: Path) -> set[tuple[str, str]]:
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm.")
        for alias in node.names
    }


@pytest.mark.parametrize("file", PRIVATE_NAMES)
def test_every_name_that_is_imported_from_vllm_is_in_the_contract(file: str) -> None:
    listed = {(need.module, need.name.partition(".")[0]) for need in ALL}
    assert private_imports(PACKAGE / "connector" / file) - listed == set()


def test_every_attribute_taken_of_vllms_objects_is_in_the_contract() -> None:
    """Of those that compat and the forward of the repair pass call by these names."""
    listed = {name for need in ALL for name in (*need.has, need.name.rpartition(".")[2])}
    objects = {"runner", "request", "config", "parallel", "spec", "group", "layer", "impl", "engines", "pool"}
    objects |= {"manager", "_runner", "vllm_config", "context", "model_config", "parallel_config", "cache_config"}
    taken = set()
    for file in ("compat.py", "workarounds.py", "worker/forward.py"):
        for node in ast.walk(ast.parse((PACKAGE / "connector" / file).read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and getattr(node.value, "id", getattr(node.value, "attr", "")) in objects
            ):
                taken.add(node.attr)
    assert len(taken) > 40
    others = {"impl"}  # of an attention layer: an attribute of each backend's, set by vLLM's ``Attention``
    assert taken - listed - others == set()


def overridden(file: str, name: str) -> Iterator[tuple[str, list[str]]]:
    """Public methods of a class of ours, with their parameters."""
    tree = ast.parse((PACKAGE / "connector" / file).read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    for method in found.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            parameters = [part.arg for part in method.args.args[1:]]
            yield from () if "property" in map(ast.unparse, method.decorator_list) else [(method.name, parameters)]


def test_every_method_that_vllm_calls_of_the_connector_is_in_the_contract() -> None:
    listed = {need.name: need.arguments for need in ALL if need.ours}
    ours = {f"KVConnectorBase_V1.{method}": given for method, given in overridden("connector.py", "KVCommConnector")}
    assert len(ours) > 15
    assert {name: listed.get(name) for name in ours} == ours
    for file, name, base in (
        ("metadata.py", "WorkerReport", "KVConnectorWorkerMetadata"),
        ("metrics.py", "ReusePromMetrics", "KVConnectorPromMetrics"),
    ):
        for method, given in overridden(file, name):
            assert listed[f"{base}.{method}"] == given


def test_the_contract_says_what_each_thing_is_for_and_names_nothing_twice() -> None:
    assert all(need.use and need.module.startswith("vllm.") for need in ALL)
    said = [
        (need.module, need.name, thing)
        for need in ALL
        for thing in (*need.has, *(["call"] if need.arguments is not None else []))
    ]
    assert len(said) == len(set(said))


def test_the_supported_range_is_that_of_the_package_and_has_been_checked() -> None:
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (low, high) = (".".join(map(str, bound)) for bound in SUPPORTED_VLLM)
    assert extras["vllm"] == [f"vllm>={low},<{high}"]
    assert f"install '{extras['vllm'][0]}'" == contract.REMEDY
    minors = {tuple(map(int, known.split(".")[:2])) for known in CHECKED_VLLM}
    assert minors == {(0, minor) for minor in range(SUPPORTED_VLLM[0][1], SUPPORTED_VLLM[1][1])}


# ---- at the start of an engine -----------------------------------------------------------------------------------


def test_the_start_costs_next_to_nothing_on_a_version_that_has_been_checked() -> None:
    contract.shortcoming.cache_clear()
    started = time.perf_counter()
    assert contract.shortcoming("0.33.0+cu130") == ""
    assert time.perf_counter() - started < 0.05


def test_another_version_is_read_and_what_it_lacks_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "installed", lambda: Sources(write(tmp_path)))
    few: tuple[Need, ...] = needs("vllm.runner | repairs | Runner: model blocks; .run(ids); .stop()\n")
    monkeypatch.setattr(contract, "REUSE", few)
    contract.shortcoming.cache_clear()
    said = contract.shortcoming("0.35.1")
    assert said == "vLLM 0.35.1 lacks Runner.blocks, Runner.stop, which reuse needs; install 'vllm>=0.32,<0.34'"
    contract.shortcoming.cache_clear()


def test_a_vllm_whose_names_cannot_be_imported_is_one_clear_error(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import kvcomm_integrations.connector.connector"],
        env=os.environ | {"PYTHONPATH": f"{write(tmp_path)}{os.pathsep}{PACKAGE.parent}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = run.stderr.splitlines()[-1]
    assert said.startswith("kvcomm_integrations.errors.MissingDependencyError: vLLM 0.35.1 lacks KVConnectorMetadata, ")
    assert said.endswith("more, which reuse needs; install 'vllm>=0.32,<0.34'")


def test_reading_the_contract_loads_neither_torch_nor_vllm() -> None:
    read = "import sys, kvcomm_integrations.connector.contract as contract; contract.installed()"
    code = f"{read}; print({{'torch', 'vllm'}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "set()\n"
