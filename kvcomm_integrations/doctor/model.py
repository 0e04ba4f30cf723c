"""Checks of a model from its files: attention, tokenizer, chat template. No weights are read."""

from __future__ import annotations

from kvcomm_integrations.chat.detect import tool_format_for
from kvcomm_integrations.doctor.finding import Finding, bad, good, skipped
from kvcomm_integrations.engines.model_support import read_config, unsupported_model
from kvcomm_integrations.errors import KVCommError
from kvcomm_integrations.prompts.builder import PromptBuilder
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.content_registry import ContentRegistry
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.wire import SegmentKind

SHARED = "How many bales of hay do twelve cows and fifteen sheep eat in a week, if a cow eats three bales a day?"
"""A content two agents' prompts share."""


def attention(model: str) -> Finding:
    """Whether the model's attention is of the kind whose KV can be reused, as far as its configuration tells."""
    config = read_config(model)
    if config is None:
        return skipped("Attention", f"{model} has no config.json on this machine; the engine's start will tell")
    reason = unsupported_model(config)
    if reason:
        return bad(
            "Attention",
            f"{reason}: requests are served, but densely",
            "use a model with full attention, such as Llama, Qwen2.5, Qwen3 or SmolLM2",
        )
    return good("Attention", f"full attention ({config.get('model_type', 'unknown type')})")


def tokenizer(model: str) -> list[Finding]:
    """Tokenizer, chat template, tool calls, and whether shared content is found in another agent's prompt."""
    try:
        loaded = ChatTokenizer.from_pretrained(model)
    except KVCommError as err:
        return [bad("Tokenizer", str(err), "give a folder with tokenizer.json and a chat template")]
    findings = [good("Tokenizer", f"{loaded.vocab_size} tokens")]
    try:
        codec = type(tool_format_for(loaded)).__name__
        findings.append(good("Tool calls", f"read by {codec}"))
    except KVCommError as err:
        findings.append(bad("Tool calls", str(err), "choose another model"))
    return [*findings, _template(loaded)]


def _template(loaded: ChatTokenizer) -> Finding:
    builder = PromptBuilder(loaded, ContentRegistry(), min_segment_tokens=1)
    spans = []
    try:
        for agent in ("planner", "solver"):
            messages = [ChatMessage("system", f"You are the {agent}."), ChatMessage("user", SHARED)]
            prompt = builder.build(messages, session="doctor", agent=agent).prompt
            spans.append(
                {prompt.token_ids[s.start : s.end] for s in prompt.segments if s.kind is SegmentKind.PLACEHOLDER}
            )
    except KVCommError as err:
        return bad("Chat template", str(err), "give the model a chat template that takes a system message")
    if spans[0] & spans[1]:
        return good("Chat template", "a question shared by two agents has the same tokens in both prompts")
    return bad(
        "Chat template",
        "a question shared by two agents was not found in both prompts",
        "the template changes what messages say; give the tokenizer another chat template",
    )
