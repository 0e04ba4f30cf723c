"""Prompts by hand and requests to a real engine, for tests of the connector."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcomm_integrations.engines.inprocess import InProcessEngine
from kvcomm_integrations.engines.interface import Delta, GenerationRequest, SamplingOptions
from kvcomm_integrations.prompts.segments import SegmentedPrompt
from kvcomm_integrations.wire import Mode, RequestReport, Segment, SegmentKind
from tests.engine.served import ServedEngine

Part = str | tuple[str, tuple[int, ...]]
"""Template text, or a named content by its token ids."""

END = "<|im_end|>\n<|im_start|>assistant\n"

ROLES = {
    "planner": "You are a planner. You break a problem into small steps and list them in order.",
    "solver": "You are a careful mathematician. Solve the problem step by step and show every computation clearly.",
    "critic": "You are a strict critic. You check each step of the others, name the errors and give a better version.",
    "writer": "You write the final answer for the user in two friendly sentences, without repeating the computation.",
}

QUESTIONS = (
    "A farmer has 12 cows and 15 sheep. Each cow eats 3 bales of hay per day and each sheep eats 1 bale. Hay costs 4 "
    "dollars per bale. How much does the farmer spend on hay in a week, and how much less if he sells 5 cows?",
    "A bus leaves the station with 38 passengers. At the first stop 9 get off and 14 get on, at the second stop 21 get "
    "off and 6 get on. Every passenger pays 2 dollars when getting on. How many are on the bus, and what was paid?",
    "Maria reads 24 pages on Monday, twice as many on Tuesday and half as many on Wednesday. Her book has 320 pages. "
    "How many pages are left, and how many days does she need if she reads 32 pages on each further day?",
)


@dataclass(frozen=True)
class Answer:
    """A finished request."""

    ids: tuple[int, ...]
    text: str
    last: Delta

    @property
    def report(self) -> RequestReport:
        assert self.last.report is not None
        return self.last.report

    @property
    def content(self) -> tuple[int, ...]:
        """Token ids without the stop token, as the next agent's prompt holds them."""
        return self.ids[:-1] if self.last.finish_reason == "stop" else self.ids


class Client:
    """Sends hand-made prompts to an engine."""

    def __init__(self, engine: InProcessEngine | ServedEngine) -> None:
        self.engine = engine

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(text, allow_special=True))

    def prompt(self, *parts: Part) -> SegmentedPrompt:
        ids: list[int] = []
        segments = []
        for part in parts:
            if isinstance(part, str):
                ids += self.encode(part)
            else:
                name, content = part
                segments.append(
                    Segment(kind=SegmentKind.PLACEHOLDER, name=name, start=len(ids), end=len(ids) + len(content))
                )
                ids += content
        return SegmentedPrompt(tuple(ids), tuple(segments))

    def request(
        self,
        prompt: SegmentedPrompt,
        *,
        agent: str = "default",
        session: str = "default",
        tenant: str = "default",
        mode: Mode = Mode.AUTO,
        policy: str | None = None,
        salt: str | None = None,
        sampling: SamplingOptions | None = None,
        respond: bool = True,
        tokens: int = 12,
    ) -> GenerationRequest:
        name = f"agent:{agent}:response" if respond else None
        params = prompt.params(
            agent=agent, session=session, tenant=tenant, response_name=name, mode=mode, policy=policy
        )
        sampling = sampling or SamplingOptions(max_tokens=tokens, temperature=0)
        return GenerationRequest(prompt, params, sampling, cache_salt=salt)

    def run(self, request: GenerationRequest) -> Answer:
        deltas = list(self.engine.generate_sync(request))
        return Answer(tuple(t for d in deltas for t in d.token_ids), "".join(d.text for d in deltas), deltas[-1])

    def ask(self, prompt: SegmentedPrompt, **options: object) -> Answer:
        return self.run(self.request(prompt, **options))  # type: ignore[arg-type]

    async def arun(self, request: GenerationRequest) -> Answer:
        deltas = [delta async for delta in self.engine.generate(request)]
        return Answer(tuple(t for d in deltas for t in d.token_ids), "".join(d.text for d in deltas), deltas[-1])


def system(agent: str) -> str:
    """The start of an agent's prompt, up to the user's content."""
    return f"<|im_start|>system\n{ROLES[agent]}<|im_end|>\n<|im_start|>user\n"


def unrotated(keys: torch.Tensor, start: int, theta: float) -> torch.Tensor:
    """Undo the rotary embedding by complex division, written independently of the package."""
    half = keys.shape[-1] // 2
    turns = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(start, start + keys.shape[-2], dtype=torch.float64)[:, None] * turns
    plane = torch.complex(keys[..., :half].double(), keys[..., half:].double()) * torch.exp(-1j * angle)
    return torch.cat([plane.real, plane.imag], -1).float()
