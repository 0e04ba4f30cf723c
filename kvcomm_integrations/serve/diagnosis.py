"""One sentence out of a server's log that says why it did not start."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIX = re.compile(r"^(\([^)]*\)\s*)?([A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\]\s*)?")
"""Process name and log header that vLLM puts before lines."""
_ERRORS = (
    re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Interrupt): (?P<text>.+)"),
    re.compile(r"^\s+(?:Value error|Assertion failed), (?P<text>.+?)(?: \[type=.*)?$"),
    re.compile(r"^\S+: error: (?P<text>.+)"),
)
"""Python's, pydantic's (a line below its own heading) and argparse's."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")
_SECONDARY = (
    "validation error for", "validation errors for", "Engine core initialization failed",
    "Engine process failed to start", "WorkerProc initialization failed",
)  # fmt: skip
"""What vLLM says when the cause is further up."""

REMEDIES = (
    (("larger than the available KV cache memory", "No available memory for the cache blocks"),
     "give the cache more memory with --kv-cache-memory-bytes, or shorten prompts with --max-model-len"),
    (("greater than the derived max_model_len",), "lower --max-model-len, or leave it out"),
    (("out of memory", "Cannot allocate memory", "can't allocate memory", "MemoryError", "requested memory for kv"),
     "there is too little memory for this model and cache: lower --kv-cache-memory-bytes or take a smaller model"),
    (("are not supported for now", "has no vLLM implementation", "Model architectures", "not recognize this arch"),
     "vLLM cannot run this model; see its list of supported models"),
    (("outgoing traffic has been disabled", "offline mode is enabled", "couldn't connect to"),
     "the model is not on this machine and the hub cannot be asked: download it first, unset HF_HUB_OFFLINE, or give a "
     "folder"),
    (("Repository Not Found", "not a valid model identifier", "gated repo"),
     "check the model's name; private and gated models need HF_TOKEN"),
    (("Address already in use",), "choose another port with --port"),
)  # fmt: skip
LONGEST = 300
"""Characters of vLLM's words that are shown."""
NOTHING = "it said nothing; run again with --verbose to see its log"


def cause(lines: Iterable[str]) -> str:
    """The first error that vLLM reports and what may be done about it.

    A failing worker tells its cause first; what the engine and the server say afterwards only refers to it.
    """
    stripped = [_PREFIX.sub("", line) for line in lines]
    found = [match["text"].strip() for line in stripped for error in _ERRORS if (match := error.match(line))]
    own = [text for text in found if not any(other in text for other in _SECONDARY)]
    if not found:
        return NOTHING
    text = (own or found)[0]
    for signs, remedy in REMEDIES:
        if any(sign in text for sign in signs):
            return f"{_beginning(text).rstrip('.')}. Remedy: {remedy}"
    return _beginning(text)


def _beginning(text: str) -> str:
    """As many whole sentences as are worth showing, or the first one cut off."""
    if len(text) <= LONGEST:
        return text
    end = max((match.start() for match in _SENTENCE_END.finditer(text) if match.start() <= LONGEST), default=0)
    return text[:end] if end else f"{text[:LONGEST]}..."
