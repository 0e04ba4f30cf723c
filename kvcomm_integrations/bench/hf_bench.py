"""Agents on a Hugging Face model: dense answers, what every policy would have made of them, and how far that is off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvcomm_integrations.bench.hf_model import DenseAnswer, HFModel
from kvcomm_integrations.bench.hf_plan import Memory, Plan, covered, make_plan, pieces
from kvcomm_integrations.bench.prompting import TeamPrompts, Turn
from kvcomm_integrations.bench.scores import Score
from kvcomm_integrations.config import Gate, ReuseConfig
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.references import Reference
from kvcomm_integrations.wire import SegmentKind


class LayerErrors:
    """Squared distances of loaded KV from the truth, by side (keys, values) and layer, summed over all tokens."""

    def __init__(self, layers: int) -> None:
        self._error, self._aligned, self._true = torch.zeros(3, 2, layers, dtype=torch.float64)

    def add(self, estimate: KV, aligned: KV, truth: KV) -> None:
        """Take in a span; ``aligned`` is its reference, rotated but not corrected. Keys of all three are rotated."""
        for side in (0, 1):
            true = truth[side].double()
            self._error[side] += (estimate[side].double() - true).square().sum((1, 2, 3)).cpu()
            self._aligned[side] += (aligned[side].double() - true).square().sum((1, 2, 3)).cpu()
            self._true[side] += true.square().sum((1, 2, 3)).cpu()

    def summary(self) -> dict[str, Any]:
        """Relative errors by layer, and the share of the true correction that the policy explains from layer 1 on."""
        relative = (self._error / self._true.clamp_min(1e-30)).sqrt()
        explained = 1 - self._error[:, 1:].sum(1) / self._aligned[:, 1:].sum(1).clamp_min(1e-30)
        return {
            "key_error": relative[0].tolist(),
            "value_error": relative[1].tolist(),
            "explained_keys": float(explained[0]),
            "explained_values": float(explained[1]),
        }


class Bench:
    """One model, its references and all policies.

    Args:
        model: the model.
        policies: names, with options if any.
        answer_tokens: length of answers.
        compared: positions of an answer that are compared.
        gate: who decides what is loaded.
    """

    def __init__(
        self,
        model: HFModel,
        policies: Sequence[str],
        answer_tokens: int,
        compared: int,
        gate: Gate = Gate.MATURITY,
    ) -> None:
        self.model = model
        self.policies: dict[str, Policy] = {name: create_policy(name) for name in policies}
        self.scores = {name: Score() for name in policies}
        self.errors: dict[str, LayerErrors] = {}
        self._answer_tokens = max(answer_tokens, compared)
        self._compared = compared
        self._memory = Memory()
        self._config = ReuseConfig(gate=gate)
        self._prompts = TeamPrompts(model.tokenizer)

    def ask(self, agent: str, content: str, turns: Sequence[Turn], *, teach: bool) -> Turn:
        """A dense answer, from which policies learn (``teach``) or with which they are compared."""
        prompt = self._prompts.write(agent, content, turns)
        dense = self.model.answer(prompt.token_ids, self._answer_tokens)
        if teach:
            self._learn(prompt, agent, dense)
        else:
            for name in self.policies:
                self._compare(name, prompt, agent, dense)
        self._remember(prompt, agent, dense)
        return Turn(agent, dense.tokens)

    def forget_contents(self) -> None:
        """Drop the references of shared contents: the next question begins."""
        self._memory.shared.clear()
        self._memory.chain.clear()

    def _compare(self, name: str, prompt: SegmentedPrompt, agent: str, dense: DenseAnswer) -> None:
        policy = self.policies[name]
        plan = make_plan(prompt, agent, self._memory, policy, self._config)
        if plan is None:
            return
        end = len(prompt.token_ids) + self._compared - 1
        kv = KV(*(side[:, :, :end].clone() for side in dense.kv))
        kv.keys[:, :, plan.exact :] = kv.values[:, :, plan.exact :] = math.nan  # whatever is not provided shows
        chosen = self._write(policy, plan, kv, dense.kv)
        ids = (*prompt.token_ids, *dense.tokens)
        spans = [*joined([*plan.gaps, *((at, at + 1) for at in chosen)]), (plan.end, end)]
        reuse = self.model.compute(kv, ids, spans, self._compared)
        estimated = sorted(set(range(plan.end)) - {t for start, stop in spans[:-1] for t in range(start, stop)})
        self._note_errors(name, plan, kv, dense.kv, estimated)
        true, guess = (torch.log_softmax(x.double(), -1) for x in (dense.logits[: self._compared], reuse))
        loaded = sum(load.end - load.start for load in plan.loads) - len(chosen)
        self.scores[name].add(
            {
                "kl": (true.exp() * (true - guess)).sum(-1).clamp_min(0).tolist(),
                "agreement": (true.argmax(-1) == guess.argmax(-1)).tolist(),
                "loaded": loaded,
                "repaired": plan.end - plan.exact - loaded,
                "prompt_tokens": len(prompt.token_ids),
            }
        )

    def _write(self, policy: Policy, plan: Plan, kv: KV, truth: KV) -> list[int]:
        """Write all estimates into ``kv``; the positions of tokens that the policy wants to be recomputed."""
        chosen: list[int] = []
        for load in plan.loads:
            reference = load.piece.reference
            part = KV(*(s[:, :, load.offset : load.offset + load.end - load.start] for s in reference.kv))
            estimate = policy.correct(load.piece.edge, part, load.offset)
            first = load.start if policy.traits.rotates else reference.position + load.offset
            estimate = self.model.rotated(estimate, first)
            for side, new in zip(kv, estimate, strict=True):
                side[:, :, load.start : load.end] = new
            tokens = policy.select(estimate.keys[1], truth.keys[1, :, load.start : load.end])
            if tokens is not None:
                chosen += [load.start + token for token in tokens.tolist()]
        return chosen

    def _note_errors(self, name: str, plan: Plan, kv: KV, truth: KV, estimated: Sequence[int]) -> None:
        """Errors of what stayed an estimate, shared contents only."""
        errors = self.errors.setdefault(name, LayerErrors(kv.keys.shape[0]))
        for load in plan.loads:
            kept = torch.tensor([t for t in estimated if load.start <= t < load.end], dtype=torch.int64)
            if load.piece.segment.kind is SegmentKind.PLACEHOLDER and len(kept):
                reference = KV(*(s[:, :, : load.piece.tokens] for s in load.piece.reference.kv))
                aligned = self.model.rotated(reference, load.piece.segment.start)
                own = kept - load.piece.segment.start
                errors.add(_at(kv, kept), _at(aligned, own), _at(truth, kept))

    def _learn(self, prompt: SegmentedPrompt, agent: str, dense: DenseAnswer) -> None:
        for policy in self.policies.values():
            for piece in pieces(prompt, agent, self._memory, policy) if policy.traits.learns else ():
                start = piece.segment.start
                reference = KV(*(side[:, :, : piece.tokens] for side in piece.reference.kv))
                policy.observe(piece.edge, reference, self.model.plain(dense.kv, start, start + piece.tokens))
        for segment in prompt.segments:
            held = self._memory.shared.get(tuple(prompt.token_ids[segment.start : segment.end]))
            if held is not None:
                edge = Edge(held.source, agent, segment.name)
                self._memory.examples[edge] = self._memory.examples.get(edge, 0) + 1

    def _remember(self, prompt: SegmentedPrompt, agent: str, dense: DenseAnswer) -> None:
        """Keep references of what had none: the answer (its last token has no KV), contents, template text."""
        for segment in covered(prompt)[1:]:
            content = tuple(prompt.token_ids[segment.start : segment.end])
            if segment.kind is SegmentKind.PLACEHOLDER:
                self._memory.chain[content] = self._reference(dense, segment.start, segment.end, agent)
                self._memory.shared.setdefault(content, self._memory.chain[content])
            elif (agent, content) not in self._memory.fixed:
                self._memory.fixed[agent, content] = self._reference(dense, segment.start, segment.end, agent)
        start = len(prompt.token_ids)
        self._memory.shared[dense.tokens] = self._reference(dense, start, start + len(dense.tokens) - 1, agent)

    def _reference(self, dense: DenseAnswer, start: int, end: int, agent: str) -> Reference:
        return Reference(0, *self.model.plain(dense.kv, start, end), position=start, source=agent)


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same tokens in order, neighbouring spans made one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _at(kv: KV, tokens: torch.Tensor) -> KV:
    return KV(*(side[:, :, tokens.to(side.device)] for side in kv))
