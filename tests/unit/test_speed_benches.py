"""The benchmarks of speed run and their figures hang together. How fast the machine is, is not tested here."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm_integrations import cli
from kvcomm_integrations.bench import gpu, overhead, plain, serve
from kvcomm_integrations.bench.admission import admission_steps
from kvcomm_integrations.bench.harness import percentile
from kvcomm_integrations.bench.micro import state_sizes
from kvcomm_integrations.bench.prompting import PaperTeam, Sizes
from kvcomm_integrations.bench.synthetic import synthetic_model
from kvcomm_integrations.config import EngineConfig
from kvcomm_integrations.engines.interface import Delta, GenerationRequest
from kvcomm_integrations.engines.vllm_args import physical_cores
from kvcomm_integrations.errors import ConfigurationError, EngineError
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import Mode, RequestReport, SegmentKind


class Clock:
    """An engine that answers at once and says of every request what a real one would."""

    tokenizer: ChatTokenizer
    made: list[Clock] = []  # noqa: RUF012
    scheduler_snapshot = SimpleNamespace(usage=0.0)

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.requests: list[GenerationRequest] = []
        self.resets = 0
        self.closed = False
        Clock.made.append(self)

    def generate_sync(self, request: GenerationRequest) -> Iterator[Delta]:
        self.requests.append(request)
        count = request.sampling.max_tokens or 1
        total = len(request.prompt.token_ids)
        slow = request.params.mode is Mode.DENSE
        report = RequestReport(
            prompt_tokens=total, loaded=0 if slow else total // 2, plan_ms=0.5, load_ms=2, repair_ms=3
        )
        for number in range(count):
            last = number == count - 1
            yield Delta(token_ids=(number,), ttft_ms=(80.0 if slow else 10.0) if last else None, report=report)

    def call_workers(self, method: str) -> list[Any]:
        if method == "kvcomm_stats":
            return [{"layout": "flash", "repair_refusal": None, "disabled": None}]
        assert method == "kvcomm_take_audits"
        audits = [
            {"policy": p, "kl": [0.25], "edges": [["a", r.params.agent, "name", ""]]}
            for r in self.requests
            for p in r.params.audit
        ]
        return [audits, []]

    def drain(self, timeout: float = 30.0) -> None:
        pass

    def reset_prefix_cache(self, *, references: bool = False, corrections: bool = False) -> bool:
        self.resets += 1
        return True

    def close(self) -> None:
        self.closed = True


class Apart:
    """An engine's process that is this one; what goes to a real one and comes back must be picklable."""

    def __init__(self, kind: type[Clock], config: EngineConfig) -> None:
        self.engine = kind(pickle.loads(pickle.dumps(config)))

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        work, args = pickle.loads(pickle.dumps((work, args)))
        return pickle.loads(pickle.dumps(work(self.engine, *args)))

    def close(self) -> None:
        self.engine.close()


def described(engine: Clock) -> dict[str, Any]:
    """What ``describe`` says of a stand-in."""
    how = {"dtype": "float32", "compilation": "none", "graphs": "none", "runner": 1, "block_size": 16}
    return how | {"vllm": "0.0", "prefix_caching": True}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> type[Clock]:
    Clock.tokenizer = ChatTokenizer.from_pretrained(demo_model)
    Clock.made = []
    for module in (gpu, plain, overhead):
        monkeypatch.setattr(module, "InProcessEngine", Clock)
    for module in (plain, overhead):
        monkeypatch.setattr(module, "PlainEngine", Clock)
        monkeypatch.setattr(module, "EngineProcess", Apart)
    monkeypatch.setattr(plain, "REST", 0.0)
    for module in (gpu, plain):
        monkeypatch.setattr(module, "describe", described)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "")  # put back what it was, whatever happens to it
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    return Clock


def test_prompts_have_the_lengths_asked_for(demo_model: Path) -> None:
    team = PaperTeam(ChatTokenizer.from_pretrained(demo_model), 3, Sizes(120, 300, 40))
    question, other = team.question(1), team.question(2)
    assert len(question) == len(other) == 300 and question != other
    answers = {name: tuple(range(40)) for name in team.names[:2]}
    prompt = team.write(team.names[2], question, answers)
    first, *rest = prompt.segments
    assert (first.kind, first.end) == (SegmentKind.FIXED, 120)
    assert [s.name for s in rest] == ["user_question", *(f"agent:{name}:response" for name in answers)]
    assert [s.end - s.start for s in rest] == [300, 40, 40]
    assert prompt.token_ids[rest[1].start : rest[1].end] == answers["planner"]
    assert team.write(team.names[2], other, answers).token_ids[:120] == prompt.token_ids[:120]
    assert team.write(team.names[1], question, {}).token_ids[:120] != prompt.token_ids[:120]


@pytest.mark.parametrize(("agents", "prefix", "complaint"), [(99, 512, "too many"), (2, 5, "too short")])
def test_impossible_teams(demo_model: Path, agents: int, prefix: int, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        PaperTeam(ChatTokenizer.from_pretrained(demo_model), agents, Sizes(prefix, 64, 16))


def test_ttft(clock: type[Clock], demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "ttft.json", tmp_path / "ttft.png"
    options = ["--model", str(demo_model), "--fast", "--json", str(out), "--plot", str(plot)]
    assert cli.main(["bench", "ttft", *options]) == 0
    shown = capsys.readouterr()
    assert "Time to first token" in shown.out
    assert "128/256/64: planner answers 2 questions" in shown.err.splitlines()
    assert "128/256/64: round 1: solver, ridge" in shown.err.splitlines()
    result = json.loads(out.read_text())
    assert [agent["index"] for agent in result["agents"]] == [1, 2, 3]
    for agent in result["agents"]:
        assert agent["speedup"] == 8.0
        assert agent["forward_ms"] == pytest.approx(10 - 5.5)
        assert agent["loaded"] == agent["prompt_tokens"] // 2
    assert result["config"]["output"] == [64]
    assert plot.stat().st_size > 1000
    plain_vllm, engine = clock.made
    assert engine.closed and plain_vllm.closed
    assert {r.params.mode for r in plain_vllm.requests} == {Mode.DENSE}
    assert Mode.DENSE not in {r.params.mode for r in engine.requests if r.params.session != "prefix"}
    assert result["plain"]["dtype"] == result["kvcomm"]["dtype"] == "float32"
    assert {len(agent) for way in result["settings"][0]["rounds"].values() for agent in way.values()} == {1}
    requests = plain_vllm.requests + engine.requests
    measured = [r for r in requests if r.sampling.max_tokens == 1 and r.params.session != "prefix"]
    first = [r.params.session for r in measured if r.params.agent == "planner"]
    assert len(first) == len(set(first)) == 2, "the first agent has nobody to load from"
    answered = [r for r in engine.requests if r.sampling.max_tokens == 64]
    assert {r.params.teach for r in answered if r.params.session == "round-1"} == {False}
    assert {r.params.teach for r in answered if r.params.session == "round-0"} == {True}


def test_ttft_of_later_agents_only(clock: type[Clock], demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "ttft.json"
    options = ["--model", str(demo_model), "--fast", "--json", str(out)]
    assert cli.main(["bench", "ttft", "--from-agent", "3", *options]) == 0
    assert [agent["index"] for agent in json.loads(out.read_text())["agents"]] == [3]
    assert cli.main(["bench", "ttft", "--from-agent", "4", *options]) == 2
    assert len(clock.made) == 2


@pytest.mark.parametrize(("kind", "figure"), [("ttft", "agents"), ("serve", "load")])
def test_dense_requests_of_the_same_engine_can_be_the_baseline(
    clock: type[Clock], demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, figure: str
) -> None:
    out = tmp_path / "out.json"
    options = ["--model", str(demo_model), "--fast", "--json", str(out), "--baseline", "engine"]
    assert cli.main(["bench", kind, *options]) == 0
    result = json.loads(out.read_text())
    (engine,) = clock.made
    assert result["plain"] is None and result[figure] and engine.config.engine_args == {}
    assert {Mode.DENSE, Mode.AUTO, Mode.OBSERVE} == {r.params.mode for r in engine.requests}
    assert "in a process of its own" not in capsys.readouterr().out


def test_plain_vllm_keeps_its_own_defaults(clock: type[Clock], demo_model: Path, tmp_path: Path) -> None:
    sizes = "--agents 2 --prefix 128 --input 64 --output 8 --warmup 1 --sessions 1 --concurrency 1"
    assert cli.main(["bench", "serve", "--model", str(demo_model), *sizes.split()]) == 0
    assert cli.main(["bench", "serve", "--model", str(demo_model), *sizes.split(), "--plain-eager"]) == 0
    compiled, ours, eager, _ = (made.config for made in clock.made)
    assert (compiled.enforce_eager, eager.enforce_eager, ours.enforce_eager) == (False, True, None)
    assert compiled.dtype == ours.dtype == "auto"
    assert compiled.max_model_len == ours.max_model_len
    assert compiled.engine_args == ours.engine_args == {"gpu_memory_utilization": 0.45}


def test_gpu(clock: type[Clock], demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    options = ["--model", str(demo_model), "--json", str(out)]
    sizes = "--agents 3 --prefix 128 --output 16 --warmup 1 --rounds 2 --decode 4 --contents 256,9000"
    assert cli.main(["bench", "gpu", *options, *sizes.split()]) == 0
    shown = capsys.readouterr().out
    assert "with ridge; harvest" in shown and "contents of 9000" in shown
    result = json.loads(out.read_text())
    assert result["engine"]["layout"] == "flash" and result["skipped"] == [9000] and "cores" in result["machine"]
    (setting,) = result["settings"]
    assert [agent["speedup"] for agent in setting["policies"]["ridge"]] == [8.0] * 3
    assert {len(agent) for way in setting["rounds"].values() for agent in way.values()} == {2}
    assert [len(held) for held in setting["harvest"]["held_ms"].values()] == [2, 2]
    (engine,) = clock.made
    timed = [r for r in engine.requests if r.sampling.max_tokens == 4]
    assert len(timed) == 3 * 3 * 2 and all(r.params.response_name for r in timed)
    assert cli.main(["bench", "gpu", *options, "--contents", "9000"]) == 2


def test_the_gpu_benchmark_writes_a_file_unless_told_where() -> None:
    args: Any = cli._parser().parse_args(["bench", "gpu"])
    assert (args.json, args.contents) == (Path("kvcomm-gpu.json"), [1024, 8192, 32768])
    with pytest.raises(SystemExit):
        cli._parser().parse_args(["bench", "gpu", "--contents", "0"])


class Echo:
    """An engine that only knows its configuration."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def close(self) -> None:
        Path(self.config.model).write_text("closed")


def model_in_another_process(engine: Echo, what: str) -> tuple[str, int]:
    """Work for an engine's process; fails as told."""
    if what == "refuse":
        raise ConfigurationError("refused")
    if what == "die":
        os._exit(1)
    return engine.config.model, os.getpid()


def test_work_is_done_in_the_engines_process(tmp_path: Path) -> None:
    engine: Any = plain.EngineProcess(Echo, EngineConfig(model=str(tmp_path / "end")))  # type: ignore[arg-type]
    model, where = engine.call(model_in_another_process, "")
    assert model == str(tmp_path / "end") and where != os.getpid()
    with pytest.raises(ConfigurationError, match="refused"):
        engine.call(model_in_another_process, "refuse")
    assert engine.call(model_in_another_process, "")[1] == where
    engine.close()
    assert (tmp_path / "end").read_text() == "closed"


def test_a_process_that_has_died_is_an_error(tmp_path: Path) -> None:
    engine: Any = plain.EngineProcess(Echo, EngineConfig(model=str(tmp_path / "end")))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="has ended"):
        engine.call(model_in_another_process, "die")
    engine.close()


@pytest.mark.parametrize(("requests", "status", "samples"), [(20, 0, 1), (5, 130, None)])
def test_an_interrupted_ttft_shows_what_it_has(
    clock: type[Clock],
    monkeypatch: pytest.MonkeyPatch,
    demo_model: Path,
    tmp_path: Path,
    requests: int,
    status: int,
    samples: int | None,
) -> None:
    """Three agents: 3 x 2 answers, 1 lesson, then 4 requests for each agent and round."""
    answer = Clock.generate_sync

    def until_interrupted(self: Clock, request: GenerationRequest) -> Iterator[Delta]:
        if sum(len(made.requests) for made in Clock.made) >= requests:
            raise KeyboardInterrupt
        yield from answer(self, request)

    monkeypatch.setattr(Clock, "generate_sync", until_interrupted)
    out = tmp_path / "ttft.json"
    sizes = "--agents 3 --prefix 128 --input 256 --output 16 --warmup 1 --rounds 2 --warm-rounds 0"
    options = ["--model", str(demo_model), *sizes.split(), "--json", str(out)]
    assert cli.main(["bench", "ttft", *options]) == status
    assert out.exists() == (samples is not None)
    assert all(made.closed for made in clock.made)
    if samples is not None:
        assert {agent["n"] for agent in json.loads(out.read_text())["agents"]} == {samples}


def test_serve(clock: type[Clock], demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serve.json"
    options = ["--model", str(demo_model), "--fast", "--rate", "1000", "--json", str(out)]
    assert cli.main(["bench", "serve", *options]) == 0
    assert "times the requests of dense" in capsys.readouterr().out
    (line,) = json.loads(out.read_text())["load"]
    assert line["concurrency"] == 2
    for way in ("dense", "auto"):
        assert line[way]["requests"] == 2 * 2
        assert line[way]["requests_per_s"] > 0
        assert line[way]["ttft_p50_ms"] <= line[way]["ttft_p99_ms"] <= line[way]["whole_p99_ms"]
    assert cli.main(["bench", "serve", *options, "--graph", "ring"]) == 2


@pytest.mark.parametrize("divergence", ["0", "0.05"])
def test_only_where_audits_can_prove_edges_are_there_audits(
    clock: type[Clock], demo_model: Path, tmp_path: Path, divergence: str
) -> None:
    out, proving = tmp_path / "ttft.json", divergence != "0"
    options = ["--model", str(demo_model), "--fast", "--small-divergence", divergence]
    assert cli.main(["bench", "ttft", *options, "--json", str(out)]) == 0
    assert {agent["audited_kl"] for agent in json.loads(out.read_text())["agents"]} == {0.25 if proving else None}
    assert cli.main(["bench", "serve", *options]) == 0
    for engine in clock.made[1::2]:  # the others are plain vLLM
        assert engine.config.reuse.small_divergence == float(divergence)
        assert any(request.params.audit for request in engine.requests) == proving
        assert not any(request.params.audit for request in engine.requests if not request.params.teach)


def test_answers_are_drawn_and_the_same_in_every_run(demo_model: Path) -> None:
    one, other = (PaperTeam(ChatTokenizer.from_pretrained(demo_model), 2, Sizes(120, 300, 32)) for _ in range(2))
    sampling = one.answering("solver", 7)
    assert sampling == other.answering("solver", 7)
    assert sampling.temperature and (sampling.min_tokens, sampling.max_tokens) == (32, 32)
    assert sampling.seed not in (one.answering("solver", 8).seed, one.answering("planner", 7).seed)


def test_overhead(
    clock: type[Clock],
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "overhead.json"
    assert cli.main(["bench", "overhead", "--model", str(demo_model), "--fast", "--json", str(out)]) == 0
    assert "reuse off" in capsys.readouterr().out
    engines = json.loads(out.read_text())["engines"]
    assert [len(pace["ttft_ms"]) for pace in engines.values()] == [2, 2, 2]
    plain, off, on = clock.made
    assert not off.config.reuse.enabled and on.config.reuse.enabled and plain.closed
    sent = [[r.prompt.token_ids for r in engine.requests] for engine in (plain, off, on)]
    assert sent[0] == sent[1] == sent[2] and len(sent[0]) == len(set(sent[0])) == 3 * 3
    cores = set(map(int, os.environ["VLLM_CPU_OMP_THREADS_BIND"].split(",")))
    assert cores <= os.sched_getaffinity(0), "vLLM would give each engine another number"
    assert len(cores) == physical_cores()


@pytest.mark.parametrize(("graph", "expected"), [("full", [0, 1, 2]), ("chain", [2]), ("star", [0])])
def test_who_hears_whom(graph: str, expected: list[int]) -> None:
    assert list(serve.GRAPHS[graph](3)) == expected
    assert list(serve.GRAPHS[graph](0)) == []


def test_percentiles() -> None:
    assert [percentile(range(1, 101), share) for share in (50, 95, 99)] == [50, 95, 99]
    assert percentile([7.0], 99) == 7.0
    assert [percentile([3.0, 1.0, 2.0], share) for share in (50, 95)] == [2.0, 3.0]


def test_micro(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "micro.json"
    options = ["--model", str(demo_model), "--fast", "--no-prefill", "--tokens", "40", "--json", str(out)]
    assert cli.main(["bench", "micro", *options]) == 0
    shown = capsys.readouterr()
    assert "Steps of a reuse" in shown.out
    assert "40 tokens: steps of a reuse" in shown.err.splitlines()
    result = json.loads(out.read_text())
    steps = {step["step"]: step for step in result["steps"]}
    assert {"gather", "correct", "scatter", "harvest", "observe"} <= set(steps)
    assert all(step["ms"] > 0 and step["tokens"] == 40 for step in steps.values())
    assert steps["gather"]["bytes"] == 2 * 2 * 30 * 3 * 40 * 64 * 4
    assert result["machine"]["copy_gbps"] > 0 and result["replaced"] == []


def test_only_anchors_grow_with_what_they_have_seen() -> None:
    ridge, kvcomm, kvcmas = state_sizes(layers=5, heads=2, dim=8)
    assert len(set(ridge.measured)) == 1 and ridge.edge == ridge.measured[0] and ridge.team == 9 * ridge.edge
    assert kvcomm.edge == 20 * 4096 * 2 * 2 * 5 * 2 * 8 * 4, "base and correction of keys and values"
    assert ridge.edge < kvcomm.edge / 20
    assert kvcmas.measured[0] < kvcmas.measured[1]


def test_admission_is_timed_step_by_step() -> None:
    steps = dict(admission_steps(1))
    assert len(steps) == 4 and all(0 < ms < 1000 for ms in steps.values())


def test_options_are_plain() -> None:
    args: Any = cli._parser().parse_args(["bench", "ttft", "--prefix", "64", "256"])
    assert isinstance(args, argparse.Namespace)
    assert (args.prefix, args.input, args.output, args.agents) == ([64, 256], [1024], [512], 5)


def test_a_synthetic_model_is_made_and_goes(demo_model: Path) -> None:
    with synthetic_model("3x128", demo_model) as folder:
        config = json.loads((Path(folder) / "config.json").read_text())
        assert (config["num_hidden_layers"], config["hidden_size"], config["num_key_value_heads"]) == (3, 128, 1)
        assert ChatTokenizer.from_pretrained(folder).encode("Hello", allow_special=False)
    assert not Path(folder).exists()
    with pytest.raises(ConfigurationError, match="LAYERSxHIDDEN"), synthetic_model("3x100", demo_model):
        pass
