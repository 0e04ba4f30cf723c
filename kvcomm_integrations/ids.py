"""Content ids: the same tokens give the same id in every process and on every machine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b


def content_id(token_ids: Iterable[int], *keys: str) -> str:
    """Hash of a segment's token ids and of whatever keeps it apart (model, LoRA adapter, tenant, session).

    Returns:
        32 hexadecimal digits.
    """
    digest = blake2b(array("q", token_ids).tobytes(), digest_size=16)
    for key in keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()
