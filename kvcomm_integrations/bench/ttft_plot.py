"""Draws how much sooner each agent answers, one line per setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_ttft(settings: Sequence[dict[str, Any]], path: Path) -> None:
    """Times to first token by agent on the left, their ratio on the right.

    Args:
        settings: lengths and figures as ``kvcomm bench ttft`` writes them.
        path: file to write; its ending names the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(12, 5))
    for setting in settings:
        size = setting["sizes"]
        label = f"{size['prefix']}/{size['input']}/{size['output']}"
        for name, agents in setting["policies"].items():
            index = [agent["index"] for agent in agents]
            [line] = times.plot(index, [agent["ttft_reuse_ms"] for agent in agents], label=f"{label} {name}")
            dense = [agent["ttft_dense_ms"] for agent in agents]
            times.plot(index, dense, linestyle="dashed", color=line.get_color())
            ratios.plot(index, [agent["speedup"] for agent in agents], label=f"{label} {name}")
    times.set_ylabel("time to first token, ms (dashed: dense with prefix caching)")
    ratios.set_ylabel("dense over reuse")
    for axes in (times, ratios):
        axes.set_xlabel("agent")
        axes.set_yscale("log")
        axes.legend()
    figure.savefig(path, dpi=120)
