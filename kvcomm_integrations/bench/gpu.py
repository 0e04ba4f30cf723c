"""The papers' set-up, and longer contents, in one command: what reuse gains on a GPU and what it costs there.

One engine, dense requests with prefix caching against reuse by turns, as ``kvcomm bench ttft`` does it, but answers are
decoded further and harvested. Then harvests alone: how much longer a request of two tokens holds its blocks after its
first one than without a harvest. All figures go into one file, with how vLLM ran and every single round.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from dataclasses import asdict
from statistics import median
from typing import Any

from transformers import AutoConfig

from kvcomm_integrations.bench.harness import ask, progress, save_json
from kvcomm_integrations.bench.plain import describe, in_words, machine, share_cores
from kvcomm_integrations.bench.prompting import PaperTeam, Sizes, greedy
from kvcomm_integrations.bench.scores import chosen_policies
from kvcomm_integrations.bench.ttft import TtftBench, show_settings
from kvcomm_integrations.config import EngineConfig, ReuseConfig
from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.wire import Mode

SPARE = 256
"""Room beyond the longest prompt and its answer, tokens."""


def run_gpu(args: argparse.Namespace) -> int:
    """Run ``kvcomm bench gpu``; returns the exit status.

    Raises:
        ConfigurationError: an unknown policy, too many agents, or a model that has room for none of the contents.
    """
    policies = chosen_policies(args)
    room = int(AutoConfig.from_pretrained(args.model).get_text_config().max_position_embeddings)
    all_sizes = [Sizes(args.prefix, content, args.output) for content in args.contents]
    needed = {size: size.longest(args.agents) + max(args.decode - args.output, 0) + SPARE for size in all_sizes}
    fitting = [size for size in all_sizes if needed[size] <= room]
    if not fitting:
        raise ConfigurationError(f"the model has room for {room} tokens; {min(needed.values())} are needed at least")
    skipped = [size.input for size in all_sizes if size not in fitting]
    reuse = ReuseConfig(
        idle_budget=0,
        store_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,
        variants=tuple(name for name in policies if ":" in name),
        small_divergence=args.small_divergence,
    )
    longest = max(needed[size] for size in fitting)
    config = EngineConfig(model=args.model, dtype=args.dtype, max_model_len=longest, seed=args.seed, reuse=reuse)
    share_cores()
    result: dict[str, Any] = {"machine": machine(), "skipped": skipped, "settings": []}
    with progress() as step, closing(InProcessEngine(config)) as engine:
        result["engine"] = describe(engine)
        [stats, *_] = engine.call_workers("kvcomm_stats")
        result["engine"] |= {name: stats[name] for name in ("layout", "repair_refusal", "disabled")}
        print(f"{in_words(result['engine'])}\non {result['machine']}")
        for number, size in enumerate(fitting):
            team = PaperTeam(engine.tokenizer, args.agents, size, args.seed + number)
            bench = TtftBench(engine, team, policies, audits=args.small_divergence > 0, tokens=args.decode)
            for text in bench.run(args):
                step(f"{size}: {text}")
            step(f"{size}: harvests")
            setting = {"sizes": asdict(size), "policies": bench.figures(), "rounds": bench.rounds()}
            result["settings"].append(setting | {"harvest": harvest_times(engine, team, args.rounds)})
            save_json(args, result)  # what there is, should a longer content fail
            engine.reset_prefix_cache(references=True, corrections=True)
    show_settings(result["settings"])
    for setting in result["settings"]:
        _show(setting)
    if skipped:
        print(f"Left out, for the model has room for {room:,} tokens: contents of {', '.join(map(str, skipped))}.")
    print(f"Everything is in {args.json}.")
    return 0


def harvest_times(engine: InProcessEngine, team: PaperTeam, rounds: int) -> dict[str, Any]:
    """How long a request of two tokens holds its blocks after its first one, by whether it is harvested, milliseconds.

    Contents of a prompt are harvested once it is computed, in the step of the second token or beside it.
    ``us_per_token`` is the difference of the medians for each token harvested (the question's), microseconds.
    """
    agent, modes = team.names[0], (Mode.OBSERVE, Mode.DENSE)
    held: dict[str, list[float]] = {mode.value: [] for mode in modes}
    for number in range(rounds):
        prompt = team.write(agent, team.question(10_000 + number), {})
        for mode in modes if number % 2 else modes[::-1]:
            engine.reset_prefix_cache()
            how: dict[str, Any] = {"session": f"harvest-{number}", "mode": mode, "teach": False}
            answer = ask(engine, prompt, greedy(2), agent, **how)
            while engine.scheduler_snapshot.usage > 0:
                time.sleep(0.0005)
            held[mode.value].append(round((time.monotonic() - answer.stamps[0]) * 1e3, 2))
    harvest_ms = median(held[Mode.OBSERVE.value]) - median(held[Mode.DENSE.value])
    return {"held_ms": held, "us_per_token": round(harvest_ms * 1e3 / team.sizes.input, 2)}


def _show(setting: dict[str, Any]) -> None:
    for name, agents in setting["policies"].items():
        dense, reuse = (median(agent[f"decode_{way}_per_s"] for agent in agents) for way in ("dense", "reuse"))
        print(
            f"Content of {setting['sizes']['input']:,}: decoding {dense:.1f} tokens a second dense, {reuse:.1f} with "
            f"{name}; harvest {setting['harvest']['us_per_token']:.1f} microseconds a token"
        )
