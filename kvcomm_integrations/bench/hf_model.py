"""A Hugging Face model whose KV can be taken out, put in, and computed again at scattered tokens.

The repair pass here is the engine's: the tokens of all gaps go through the model together, each with its own position
and with a mask that lets it see everything before it; every layer writes their KV before it attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.rope import Rope


class ScatteredCache(DynamicCache):
    """KV of one sequence in which tokens at any ``positions`` are written as they are computed.

    Args:
        kv: rotated keys, and values, ``(layers, kv_heads, tokens, head_dim)``; written in place.
        positions: where the tokens of the next forward belong, ``(count,)``.
    """

    def __init__(self, kv: KV, positions: torch.Tensor) -> None:
        super().__init__()
        self._kv = kv
        self._positions = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values ``(1, kv_heads, count, head_dim)`` and return all of the sequence."""
        for side, new in zip(self._kv, (key_states, value_states), strict=True):
            side[layer_idx][:, self._positions] = new[0]
        return self._kv.keys[layer_idx][None], self._kv.values[layer_idx][None]


@dataclass(frozen=True)
class DenseAnswer:
    """What a model says to a prompt when everything is computed."""

    tokens: tuple[int, ...]
    """Greedy answer."""
    kv: KV
    """Rotated keys, and values, of the prompt and all answer tokens but the last."""
    logits: torch.Tensor
    """``(len(tokens), vocabulary)``, of the distributions the tokens were taken from."""


class HFModel:
    """A causal language model of transformers (a folder, or a hub id) in float32, on the GPU if there is one."""

    def __init__(self, folder: str | Path) -> None:
        self.tokenizer = ChatTokenizer.from_pretrained(folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.eval().requires_grad_(False).to(self.device)
        self.rope = Rope.from_hf_config(self._model.config.get_text_config())

    def answer(self, ids: Sequence[int], count: int) -> DenseAnswer:
        """``count`` tokens, the most likely each time, stop tokens included."""
        cache = DynamicCache()
        given = torch.tensor([list(ids)], device=self.device)
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        while len(tokens) < count:
            out = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            given = torch.tensor([tokens[-1:]], device=self.device)
        keys, values = (torch.cat([getattr(layer, side) for layer in cache.layers]) for side in ("keys", "values"))
        return DenseAnswer(tuple(tokens), KV(keys, values), torch.stack(logits))

    def compute(self, kv: KV, ids: Sequence[int], positions: Sequence[int], keep: int) -> torch.Tensor:
        """Compute the tokens at some positions over the KV that is there, writing theirs into it.

        Args:
            kv: rotated keys, and values, of the whole sequence.
            ids: the sequence's tokens.
            positions: in order, at least one.
            keep: last tokens whose logits are wanted.

        Returns:
            logits ``(keep, vocabulary)``.
        """
        at = torch.tensor(positions, device=self.device)
        tokens = torch.tensor([[ids[position] for position in positions]], device=self.device)
        unseen = torch.arange(kv.keys.shape[2], device=self.device)[None] > at[:, None]
        mask = torch.zeros(unseen.shape, device=self.device).masked_fill(unseen, torch.finfo(torch.float32).min)
        where = {"position_ids": at[None], "attention_mask": mask[None, None]}
        cache = ScatteredCache(kv, at)
        return self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=keep, **where).logits[0]

    def plain(self, kv: KV, start: int, end: int) -> KV:
        """A copy of tokens ``[start, end)`` with the rotation taken off their keys."""
        positions = torch.arange(start, end, device=self.device)
        return KV(self.rope.unrotate(kv.keys[:, :, start:end], positions), kv.values[:, :, start:end].clone())

    def rotated(self, kv: KV, start: int) -> KV:
        """Keys rotated to positions from ``start`` on."""
        positions = torch.arange(start, start + kv.keys.shape[2], device=self.device)
        return KV(self.rope.rotate(kv.keys, positions), kv.values)
