"""Engines in processes of their own, and plain vLLM among them as its users start it: what reuse is compared with.

Benchmarks hand such an engine the work that is to be timed, so that times are taken alike on all sides: in the process
that talks to the engine. All engines stay alive and take turns, on the same cores of a CPU. A turn begins when all
others are asleep: vLLM's workers poll for a second after their last work.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine, PlainEngine
from kvcomm_integrations.engines.vllm_args import BINDING_VARIABLE
from kvcomm_integrations.errors import EngineError, KVCommError

T = TypeVar("T")
PLAIN, ENGINE = "plain", "engine"
"""Baselines: plain vLLM in a process of its own, or dense requests in the engine that also reuses."""
REST = 1.1
"""Pause before a turn, seconds, a little longer than the others' workers poll."""
MEMORY_SHARE = 0.45
"""Of a GPU's memory, for each of two engines."""
END_S = 60.0
"""How long an engine's process may take to end, seconds."""


class EngineProcess:
    """An engine in a process of its own, started with the first call.

    Args:
        kind: class of the engine.
        config: its configuration.
    """

    def __init__(self, kind: type[InProcessEngine], config: EngineConfig) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer_calls, args=(kind, config, theirs))
        self._process.start()
        theirs.close()

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """What ``work(engine, *args)`` returns in the engine's process; all of it must be picklable.

        Raises:
            KVCommError: the work has raised it.
            EngineError: the process has ended.
        """
        try:
            self._pipe.send((work, args))
            answer, error = self._pipe.recv()
        except (EOFError, OSError) as gone:
            raise EngineError("an engine's process has ended; what it has printed above says why") from gone
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """End the engine and its process."""
        self._pipe.close()
        self._process.join(END_S)
        self._process.terminate()


def _answer_calls(kind: type[InProcessEngine], config: EngineConfig, pipe: Connection) -> None:
    """Work off calls until the other end is closed, or its process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that calls ends this one
    with closing(kind(config)) as engine, suppress(EOFError, OSError):
        while True:
            work, args = pipe.recv()
            try:
                pipe.send((work(engine, *args), None))
            except KVCommError as error:
                pipe.send((None, error))


def rest() -> None:
    """Wait until engines that have had their turn are asleep."""
    time.sleep(REST)


@contextmanager
def compared(
    config: EngineConfig, baseline: str, *, eager: bool
) -> Iterator[tuple[InProcessEngine, EngineProcess | None, dict[str, Any]]]:
    """The engine that reuses, plain vLLM beside it if that is the baseline (otherwise ``None``), and how they run.

    Both are started here, and a header says how they run.

    Args:
        config: of the engine that reuses; plain vLLM takes the model, dtype, lengths and memory from it, no more.
        baseline: ``PLAIN`` or ``ENGINE``.
        eager: plain vLLM does not compile the model either, which it does by default, and which takes minutes.
    """
    share_cores()
    apart = baseline == PLAIN
    if apart:
        config = config.model_copy(update={"engine_args": {"gpu_memory_utilization": MEMORY_SHARE}})
    usual = config.model_copy(update={"enforce_eager": eager})
    with (
        closing(EngineProcess(PlainEngine, usual)) if apart else nullcontext() as plain,
        closing(InProcessEngine(config)) as engine,
    ):
        how: dict[str, Any] = {"machine": machine(), "plain": plain and plain.call(describe)}
        how["kvcomm"] = describe(engine)
        for name in ("plain", "kvcomm")[not apart :]:
            print(f"{name}: {in_words(how[name])}")
        print(f"on {how['machine']}" + "; each in a process of its own, both alive, taking turns" * apart)
        yield engine, plain, how


def describe(engine: InProcessEngine) -> dict[str, Any]:
    """How an engine runs, as vLLM has decided; starts it if need be."""
    import vllm

    config = engine._started().vllm_config
    return {
        "vllm": vllm.__version__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "compilation": config.compilation_config.mode.name.lower(),
        "graphs": config.compilation_config.cudagraph_mode.name.lower(),
        "runner": 2 if config.use_v2_model_runner else 1,
        "attention": getattr(config.attention_config.backend, "name", "vLLM's choice"),
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "max_model_len": config.model_config.max_model_len,
    }


def in_words(how: dict[str, Any]) -> str:
    """One line of what ``describe`` says."""
    caching = "with" if how["prefix_caching"] else "without"
    return (
        f"vLLM {how['vllm']}, {how['dtype']}, compilation {how['compilation']}, graphs {how['graphs']}, model runner "
        f"{how['runner']}, blocks of {how['block_size']}, {caching} prefix caching"
    )


def machine() -> str:
    """The GPU, or the kind of CPU with the cores that engines are given."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = next((line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")), "a CPU")
    return f"{name} {'with' if 'amx_bf16' in text else 'without'} AMX, cores {os.environ.get(BINDING_VARIABLE)}"


def share_cores() -> None:
    """Give every engine the same cores, one thread for each, unless the user has said which.

    Left to itself, vLLM keeps a core of a CPU for its scheduler and, where a KV connector is configured, one more for
    that; where it has too few it keeps none. The engines would differ by a core of products, not by our work.
    """
    siblings = Path("/sys/devices/system/cpu")
    cores = {}
    for number in sorted(os.sched_getaffinity(0)):
        file = siblings / f"cpu{number}/topology/thread_siblings_list"
        cores[file.read_text() if file.exists() else str(number)] = number
    os.environ.setdefault(BINDING_VARIABLE, ",".join(map(str, cores.values())))
