"""One sentence out of a server's log that says why it did not start."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIX = re.compile(r"^(\([^)]*\)\s*)?([A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\]\s*)?")
"""Process name and log header that vLLM puts before lines."""
_ERROR = re.compile(r"^(?:[\w.]+\.)?(?P<kind>\w*(?:Error|Exception|Exit|Interrupt)): (?P<text>.+)")
_VALUE = re.compile(r"^\s+(?:Value error|Assertion failed), (?P<text>.+?)(?: \[type=.*)?$")
"""What a settings class of vLLM refuses, a line below pydantic's own heading."""
_USAGE = re.compile(r"^\S+: error: (?P<text>.+)")
_SECONDARY = (
    "validation error for", "validation errors for", "Engine core initialization failed",
    "Engine process failed to start", "WorkerProc initialization failed",
)  # fmt: skip
"""What vLLM says when the cause is further up."""

REMEDIES = (
    (("larger than the available KV cache memory", "No available memory for the cache blocks", "max seq len"),
     "give the cache more memory with --kv-cache-memory-bytes, or shorten prompts with --max-model-len"),
    (("out of memory", "Cannot allocate memory", "can't allocate memory", "MemoryError"),
     "there is too little memory for this model and cache: lower --kv-cache-memory-bytes or take a smaller model"),
    (("are not supported for now", "has no vLLM implementation", "Model architectures"),
     "vLLM cannot run this model; see its list of supported models"),
    (("Address already in use",), "choose another port with --port"),
)  # fmt: skip
LONGEST = 300
"""Characters of vLLM's words that are shown."""
NOTHING = "it said nothing; run again with --verbose to see its log"


def cause(lines: Iterable[str]) -> str:
    """The first error that vLLM reports and what may be done about it.

    A failing worker tells its cause first; what the engine and the server say afterwards only refers to it.
    """
    found = [text for line in lines if (text := _error_of(_PREFIX.sub("", line)))]
    own = [text for text in found if not any(other in text for other in _SECONDARY)]
    if not own and not found:
        return NOTHING
    text = (own or found)[0]
    for signs, remedy in REMEDIES:
        if any(sign in text for sign in signs):
            return f"{text.rstrip('.')}. Remedy: {remedy}"
    return text


def _error_of(line: str) -> str:
    match = _ERROR.match(line) or _VALUE.match(line) or _USAGE.match(line)
    return match["text"].strip()[:LONGEST] if match else ""
