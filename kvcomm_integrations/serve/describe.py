"""What a server hands out to clients of this package: a description of itself, and its tokenizer's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcomm_integrations._version import __version__
from kvcomm_integrations.engines.vllm_args import CONNECTOR
from kvcomm_integrations.serve.tenants import Tenants
from kvcomm_integrations.wire import WIRE_VERSION, ServerInfo

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json", "config.json",
)  # fmt: skip


async def describe(client: Any, tenants: Tenants) -> dict[str, Any]:
    """A ``ServerInfo`` as JSON.

    Args:
        client: vLLM's engine client.
        tenants: where the server's tenants come from.
    """
    config = client.vllm_config
    transfer = config.kv_transfer_config
    connector = transfer is not None and transfer.kv_connector == CONNECTOR
    has_extension = connector and config.parallel_config.worker_extension_cls
    stats: list[dict[str, Any]] = await client.collective_rpc("kvcomm_stats") if has_extension else []
    info = ServerInfo(
        version=__version__,
        wire=WIRE_VERSION,
        connector=connector,
        refusal=next((rank["disabled"] for rank in stats if rank["disabled"]), ""),
        repair_refusal=next((rank["repair_refusal"] for rank in stats if rank["repair_refusal"]), None),
        tenants=tenants.source,
    )
    return info.model_dump(mode="json")


def tokenizer_files(client: Any) -> dict[str, str]:
    """Names and texts of the files a client needs to build prompts for the served model. Reads them: takes a while."""
    from transformers.utils import cached_file

    found = {}
    for name in TOKENIZER_FILES:
        path = cached_file(str(client.model_config.tokenizer), name, _raise_exceptions_for_missing_entries=False)
        if path:
            found[name] = Path(path).read_text(encoding="utf-8")
    return found
