"""``kvcomm serve`` without vLLM: what it refuses, what it would start, and how it starts and stops processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcomm_integrations import cli
from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.serve.arguments import Launch, given, launch
from kvcomm_integrations.serve.diagnosis import NOTHING, cause
from kvcomm_integrations.serve.names import LIVE_VARIABLE
from kvcomm_integrations.serve.supervisor import Supervisor

# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_command_has_our_connector_and_the_users_options(folder: Path, port: int) -> None:
    found = launch(str(folder), ["--port", str(port), "--max-model-len=512"], reuse='{"policy": "aligned"}')
    command = list(found.command)
    assert command[0] == sys.executable
    assert str(folder) in command
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KVCommConnector"
    assert transfer["kv_connector_extra_config"]["policy"] == "aligned"
    assert "--max-model-len=512" in command
    assert "--enforce-eager" in command
    assert found.url == f"http://127.0.0.1:{port}"


def test_what_the_user_says_goes_before_our_defaults(folder: Path, port: int) -> None:
    options = ["--port", str(port), "--dtype=bfloat16", "--no-enforce-eager", "--kv_cache_memory_bytes", "1000000000"]
    command = launch(str(folder), options).command
    assert "float32" not in command
    assert "--enforce-eager" not in command
    assert sum("kv" in part and "cache" in part and "memory" in part for part in command) == 1


@pytest.mark.parametrize(
    ("options", "value"),
    [(["--a-b", "x"], "x"), (["--a-b=x"], "x"), (["--a_b", "x"], "x"), (["--a-b"], ""), (["--a-b", "--c"], ""),
     (["--c", "x"], None), ([], None), (["a-b"], None)],
)  # fmt: skip
def test_options_are_found_in_every_spelling(options: list[str], value: str | None) -> None:
    assert given(options, "a-b") == value


@pytest.mark.parametrize(
    ("options", "arguments", "pattern"),
    [
        ([], {"reuse": "{"}, "--reuse"),
        ([], {"reuse": '{"polcy": "x"}'}, "polcy"),
        (["--kv-transfer-config", "{}"], {}, "kv-transfer-config is set by kvcomm serve"),
        (["--port", "0"], {}, "1 to 65535"),
        (["--port", "http"], {}, "'http'"),
        ([], {"tenant_header": "X", "tenant_keys": Path("y")}, "drop one"),
        ([], {"tenant_header": "X", "reuse": '{"isolation": "global"}'}, "global"),
        ([], {"tenant_keys": Path("missing.json")}, "missing.json"),
        (["--host", "203.0.113.1"], {}, "cannot listen on 203.0.113.1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path, options: list[str], arguments: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(ConfigurationError, match=pattern):
        launch(str(folder), options, **arguments)


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({}, [], ""),
        ({"sliding_window": 512}, [], "sliding window of 512 tokens"),
        ({"sliding_window": 512}, ["--disable-sliding-window"], ""),
        ({"kv_lora_rank": 512}, [], "(MLA)"),
        ({}, ["--kv-cache-dtype", "fp8"], "quantised (fp8)"),
    ],
)
def test_a_model_without_reuse_is_told_before_it_is_loaded(
    folder: Path, port: int, config: dict[str, Any], options: list[str], reason: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    found = launch(str(folder), [*options, "--port", str(port)])
    assert reason in found.dense and bool(reason) == bool(found.dense)

    def start(supervisor: Supervisor, timeout: float) -> None:
        raise EngineError("no server in this test")

    monkeypatch.setattr(Supervisor, "start", start)
    assert cli.main(["serve", str(folder), *options, "--port", str(port)]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert (f"will run without reuse: {found.dense}; without --allow-dense" in first) == bool(reason)


@pytest.mark.parametrize("live", [True, False])
def test_the_live_page_is_served_on_request_only(
    folder: Path, port: int, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    monkeypatch.delenv(LIVE_VARIABLE, raising=False)
    found = launch(str(folder), ["--port", str(port)], live=live)
    assert found.environment.get(LIVE_VARIABLE) == ("1" if live else None)


def test_a_taken_port(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {number}.*choose another with --port"):
            launch(str(folder), ["--host", "127.0.0.1", "--port", str(number)])


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_model_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=name):
        launch(str(tmp_path / name), [])


@pytest.mark.parametrize("arguments", [["/no/such/model"], ["x", "--port", "99999"], ["x", "--reuse", "[]"]])
def test_the_command_ends_with_one_line_and_status_two(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcomm_integrations.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvcomm: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


# ---- diagnosis -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        ([], NOTHING),
        (["INFO all is well"], NOTHING),
        (
            [
                "(EngineCore pid=1) ERROR 11-29 19:00:00 [core.py:1] Traceback (most recent call last):",
                "(EngineCore pid=1) ERROR 11-29 19:00:00 [core.py:1] ValueError: 5 GiB is larger than the available KV "
                "cache memory (1 GiB)",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            r"^5 GiB is larger .* Remedy: .*--kv-cache-memory-bytes",
        ),
        (["(APIServer pid=1) torch.OutOfMemoryError: first", "ValueError: second"], "^first"),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, Model architectures ['X'] are not supported for now. [type=value_error, x]",
            ],
            r"^Model architectures \['X'\] are not supported for now\. Remedy: vLLM cannot run",
        ),
        (["api_server.py: error: unrecognized arguments: --nonsense"], "unrecognized arguments: --nonsense"),
        (["RuntimeError: Engine core initialization failed."], "Engine core initialization failed"),
        (
            [
                "ValueError: Model architectures ['X'] are not supported for now. Supported architectures: "
                + "Y, " * 200
            ],
            r"^Model architectures \['X'\] are not supported for now\. Remedy: vLLM cannot run",
        ),
        (["LocalEntryNotFoundError: Not here and outgoing traffic has been disabled."], "Remedy: .*HF_HUB_OFFLINE"),
        (["ValueError: " + "x" * 1000], "^x{300}[.]{3}$"),
    ],
)
def test_the_cause_is_found_in_a_log(lines: list[str], pattern: str) -> None:
    import re

    assert re.search(pattern, cause(lines))


# ---- processes -------------------------------------------------------------------------------------------------------

SERVER = """
import http.server, multiprocessing, os, signal, sys, time

def child():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass

if __name__ == "__main__":
    port, how = int(sys.argv[1]), sys.argv[2]
    if how == "fails":
        raise ValueError("No available memory for the cache blocks")
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    print("CHILD", process.pid, flush=True)
    if how == "hangs":
        time.sleep(600)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "dies":
        import threading
        threading.Timer(1.0, lambda: os._exit(3)).start()
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, port: int) -> Callable[[str], tuple[Supervisor, list[str]]]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    def make(how: str) -> tuple[Supervisor, list[str]]:
        lines: list[str] = []
        command = (sys.executable, str(script), str(port), how)
        return Supervisor(Launch(command, dict(os.environ), "m", f"http://127.0.0.1:{port}"), lines.append), lines

    return make


def _gone(lines: list[str], seconds: float = 10) -> bool:
    pids = [int(line.split()[1]) for line in lines if line.startswith("CHILD")]
    deadline = time.monotonic() + seconds
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_is_started_and_stopped_with_its_children(server: Any) -> None:
    supervisor, lines = server("well")
    supervisor.start(30)
    supervisor.stop()
    assert supervisor.wait() == 0
    assert lines
    assert _gone(lines)


def test_a_server_that_fails_says_why(server: Any) -> None:
    supervisor, _ = server("fails")
    with pytest.raises(EngineError, match=r"did not start: No available memory .*--kv-cache-memory-bytes"):
        supervisor.start(30)


def test_a_server_that_never_answers_is_given_up(server: Any) -> None:
    supervisor, lines = server("hangs")
    with pytest.raises(EngineError, match="did not answer within 2 s"):
        supervisor.start(2)
    assert _gone(lines)


def test_a_server_that_dies_by_itself_leaves_no_child(server: Any) -> None:
    supervisor, lines = server("dies")
    supervisor.start(30)
    assert supervisor.wait() == 3
    assert _gone(lines)


def test_a_server_that_does_not_stop_is_killed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm_integrations.serve.supervisor.STOP_S", 1.0)
    supervisor, lines = server("deaf")
    supervisor.start(30)
    supervisor.stop()
    assert supervisor.wait() == 0
    assert _gone(lines)


def test_a_killed_supervisor_takes_its_server_along(server: Any, tmp_path: Path, port: int) -> None:
    program = f"""
import os, sys, time
from kvcomm_integrations.serve.arguments import Launch
from kvcomm_integrations.serve.supervisor import Supervisor
command = (sys.executable, {str(tmp_path / "server.py")!r}, "{port}", "well")
s = Supervisor(Launch(command, dict(os.environ), "m", "http://127.0.0.1:{port}"), print)
s.start(30)
print("SERVER", s._process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("SERVER"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = _runs(pid)
    os.killpg(pid, signal.SIGKILL)
    assert not alive
