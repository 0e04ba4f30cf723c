"""Agents on a Hugging Face model: dense answers, what every policy would have made of them, and how far that is off."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kvcomm_integrations.bench.hf_model import DenseAnswer, HFModel
from kvcomm_integrations.bench.prompting import TeamPrompts, Turn
from kvcomm_integrations.bench.scores import Score
from kvcomm_integrations.config import Gate, ReuseConfig
from kvcomm_integrations.planning.content_keys import names_session
from kvcomm_integrations.planning.entries import Entry
from kvcomm_integrations.planning.forecast import ForecastRequest, PlanForecast
from kvcomm_integrations.planning.job_writer import load_spans
from kvcomm_integrations.planning.jobs import LoadSpan
from kvcomm_integrations.planning.plan import Planned
from kvcomm_integrations.planning.resolved_prompt import Part, ResolvedPrompt, resolve
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
    """One model, its references and all policies; what is loaded and repaired is planned as in the engine.

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
        self._config = ReuseConfig(gate=gate, max_repair_share=1.0)
        forecast = PlanForecast(self._config)
        self._index, self._edges, self.planner = forecast.index, forecast.edges, forecast.planner
        self._reservations = forecast.reservations
        self._references: dict[int, Reference] = {}
        self._examples: Counter[Edge] = Counter()
        self._prompts = TeamPrompts(model.tokenizer)

    def ask(self, agent: str, content: str, turns: Sequence[Turn], *, teach: bool) -> Turn:
        """A dense answer, from which policies learn (``teach``) or with which they are compared."""
        prompt = self.resolve(self._prompts.write(agent, content, turns), agent)
        dense = self.model.answer(prompt.token_ids, self._answer_tokens)
        if not teach:
            for name in self.policies:
                self.compare(name, prompt, dense)
        self.remember(prompt, dense, teach=teach)
        return Turn(agent, dense.tokens)

    def resolve(self, prompt: SegmentedPrompt, agent: str) -> ResolvedPrompt:
        """An agent's prompt as the planner takes it, with every policy of the benchmark."""
        names = tuple(self.policies)
        params = prompt.params(agent=agent, response_name="answer", policy=names[0], audit=names[1:])
        request = ForecastRequest("", prompt.token_ids, len(prompt.token_ids), None)
        return resolve(request, params, self._config)

    def forget_contents(self) -> None:
        """Drop the references of shared contents: the next question begins."""
        for scope in self._index.scopes:
            if names_session(scope, "default", "default"):
                self._index.withdraw_scope(scope)
        for ref_id in self._index.take_drops():
            self._references.pop(ref_id, None)

    def plan(self, name: str, prompt: ResolvedPrompt) -> Planned:
        """What a policy would do with a prompt whose beginning is in the prefix cache."""
        held = self.planner.look_up(prompt)
        for segment, here in zip(prompt.segments, held, strict=True):
            chosen = self.planner.choose(prompt, segment, here, name) if segment.part is Part.CONTENT else None
            if chosen is not None:
                self._rate(name, self.planner.edge(prompt, segment, chosen.entry), chosen.entry)
        return self.planner.plan(prompt, held, prompt.segments[0].segment.end, name)

    def _rate(self, name: str, edge: Edge, entry: Entry) -> None:
        """Tell the planner what a worker would have: how many examples, and how new the content is to them."""
        known = self.policies[name].ready(edge, self._references[entry.ref_id].kv)
        if known.examples:
            self._edges.learned(name, edge, known.examples)
        if known.leverage is not None:
            entry.leverage[(name, edge)] = known.leverage
        if self._config.policy not in self.policies:  # policies that learn nothing are judged by its examples
            self._edges.learned(self._config.policy, edge, self._examples[edge])

    def compare(self, name: str, prompt: ResolvedPrompt, dense: DenseAnswer) -> None:
        """Score what a policy would have made of a prompt."""
        policy = self.policies[name]
        planned = self.plan(name, prompt)
        plan = planned.plan
        if plan is None or not any(self._is_content(planned, span.candidate) for span in plan.spans):
            return
        end = prompt.length + self._compared - 1
        kv = KV(*(side[:, :, :end].clone() for side in dense.kv))
        kv.keys[:, :, plan.exact :] = kv.values[:, :, plan.exact :] = math.nan  # whatever is not provided shows
        spans = load_spans(plan, planned.candidates)
        chosen = [token for span in spans for token in self._write(policy, span, kv, dense.kv)]
        ids = (*prompt.token_ids, *dense.tokens)
        repaired = {*chosen, *(token for gap in plan.gaps for token in range(*gap))}
        reuse = self.model.compute(kv, ids, [*sorted(repaired), *range(plan.end, end)], self._compared)
        estimated = set(range(plan.end)) - repaired
        contents = [s for s, at in zip(spans, plan.spans, strict=True) if self._is_content(planned, at.candidate)]
        self._note_errors(name, contents, kv, dense.kv, sorted(estimated))
        true, guess = (torch.log_softmax(x.double(), -1) for x in (dense.logits[: self._compared], reuse))
        loaded = plan.loaded - len(chosen)
        self.scores[name].audits.append(
            {
                "kl": (true.exp() * (true - guess)).sum(-1).clamp_min(0).tolist(),
                "agreement": (true.argmax(-1) == guess.argmax(-1)).tolist(),
                "loaded": loaded,
                "repaired": plan.end - plan.exact - loaded,
                "prompt_tokens": prompt.length,
            }
        )

    @staticmethod
    def _is_content(planned: Planned, candidate: int) -> bool:
        return planned.candidates[candidate].segment.kind is SegmentKind.PLACEHOLDER

    def _part(self, ref_id: int, offset: int, tokens: int) -> KV:
        """So many tokens of a reference, from ``offset`` on."""
        return KV(*(side[:, :, offset : offset + tokens] for side in self._references[ref_id].kv))

    def _write(self, policy: Policy, span: LoadSpan, kv: KV, truth: KV) -> list[int]:
        """Write a span's estimate into ``kv``; the positions of tokens that the policy wants to be recomputed."""
        estimate = policy.correct(span.edge, self._part(span.ref_id, span.offset, span.end - span.start), span.offset)
        source = self._references[span.ref_id].position + span.offset
        estimate = self.model.rotated(estimate, span.start if policy.traits.rotates else source)
        for side, new in zip(kv, estimate, strict=True):
            side[:, :, span.start : span.end] = new
        tokens = policy.select(estimate.keys[1], truth.keys[1, :, span.start : span.end])
        return [] if tokens is None else [span.start + token for token in tokens.tolist()]

    def _note_errors(self, name: str, spans: Sequence[LoadSpan], kv: KV, truth: KV, estimated: Sequence[int]) -> None:
        """Errors of what stayed an estimate, shared contents only."""
        errors = self.errors.setdefault(name, LayerErrors(kv.keys.shape[0]))
        for span in spans:
            kept = torch.tensor([t for t in estimated if span.start <= t < span.end], dtype=torch.int64)
            if len(kept):
                aligned = self.model.rotated(self._part(span.ref_id, span.offset, span.end - span.start), span.start)
                errors.add(_at(kv, kept), _at(aligned, kept - span.start), _at(truth, kept))

    def remember(self, prompt: ResolvedPrompt, dense: DenseAnswer, *, teach: bool = False) -> None:
        """Keep what a dense run leaves behind: examples if it teaches, and references of what had none."""
        left = self._reservations.reserve_prompt(prompt, self.planner.look_up(prompt), approximate=False)
        for example in left.examples if teach else ():
            reference = self._part(example.ref_id, example.offset, example.tokens)
            truth = self.model.plain(dense.kv, example.start, example.start + example.tokens)
            self.policies[example.policy].observe(example.edge, reference, truth)
            self._examples[example.edge] += example.policy == next(iter(self.policies))
        answer = self._reservations.reserve_answer(prompt, dense.tokens, len(dense.tokens) - 1, approximate=False)
        for harvest in filter(None, (*left.harvests, answer)):
            kv = self.model.plain(dense.kv, harvest.start, harvest.end)
            ref_id = harvest.entry.ref_id
            self._references[ref_id] = Reference(ref_id, *kv, position=harvest.start, source=prompt.agent)
            self._index.acknowledge(ref_id, 1)


def _at(kv: KV, tokens: torch.Tensor) -> KV:
    return KV(*(side[:, :, tokens.to(side.device)] for side in kv))
