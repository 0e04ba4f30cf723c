"""A forward of our own over rows of tokens in the paged cache, by itself or as part of the step's own forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvcomm_integrations.connector.compat import (
    ForwardContext,
    attention_metadata,
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)
from kvcomm_integrations.reuse.transfers import to_device

TOKEN_TYPE, POSITION_TYPE = torch.int32, torch.int64
"""As vLLM gives them to the model: what is compiled reads memory as these, whatever type the tensors have."""


def virtual_batch(
    runner: Any,
    *,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Iterable[int]],
) -> VirtualBatch:
    """Prepare to compute rows of an own making, whose KV is written into the paged cache.

    Row ``i`` holds the query tokens ``query_starts[i]:query_starts[i + 1]`` of a sequence whose first ``seq_lens[i]``
    tokens lie in ``block_tables[i]``. Every layer writes the KV of all rows before it attends, so rows that belong to
    the same sequence see one another. Logits are not computed. Nothing here waits for another rank; the forward does.

    Args:
        runner: the worker's model runner.
        token_ids, positions, slots: ``(tokens,)``, of all rows one after another.
    """
    return VirtualBatch(
        runner,
        to_device(token_ids.to(TOKEN_TYPE), runner.device),
        to_device(positions.to(POSITION_TYPE), runner.device),
        _Rows(
            torch.tensor(list(query_starts), dtype=torch.int32),
            torch.tensor(list(seq_lens), dtype=torch.int32),
            _padded([list(table) for table in block_tables]),
            slots,
        ),
    )


class _Rows(NamedTuple):
    """Sequences of one batch as attention sees them, in host memory."""

    query_starts: torch.Tensor
    """``(rows + 1,)`` int32, ending with the number of tokens."""
    seq_lens: torch.Tensor
    tables: torch.Tensor
    """``(rows, blocks)`` int32; what is beyond a row's blocks does not matter."""
    slots: torch.Tensor
    """``(tokens,)`` int64."""

    def followed_by(self, other: _Rows) -> _Rows:
        """One batch of both."""
        return _Rows(
            torch.cat([self.query_starts, self.query_starts[-1] + other.query_starts[1:]]),
            torch.cat([self.seq_lens, other.seq_lens]),
            _padded([*self.tables.tolist(), *other.tables.tolist()]),
            torch.cat([self.slots, other.slots]),
        )


class VirtualBatch:
    """Rows that are ready to be computed, once: in a forward of their own, or in the one that the step is about to run.

    All ranks must do the same with theirs.

    Args:
        runner: the worker's model runner.
        token_ids, positions: ``(tokens,)``, on the device, int32 and int64.
        rows: whose tokens they are.
    """

    def __init__(self, runner: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: _Rows) -> None:
        self._runner = runner
        self._ids = token_ids
        self._positions = positions
        self._rows = rows
        self._metadata, self._slots = self._attention(rows, positions)

    def __call__(self) -> torch.Tensor:
        """Run a forward of their own.

        Returns:
            the last layer's hidden states, ``(tokens, hidden)``.
        """
        with self.step():
            return self.forward()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The step whose forward computes these rows."""
        names, tokens = self._layers(), self._ids.numel()
        with (
            torch.inference_mode(),
            set_forward_context(
                dict.fromkeys(names, self._metadata),
                self._runner.vllm_config,
                num_tokens=tokens,
                slot_mapping=dict.fromkeys(names, self._slots),
                is_padding=torch.zeros(tokens, dtype=torch.bool, device=self._ids.device),
            ),
        ):
            yield

    def forward(self) -> torch.Tensor:
        """The forward of that step; result as of a call."""
        hidden: torch.Tensor = self._runner.model(input_ids=self._ids, positions=self._positions)
        return hidden

    def join(self, done: Callable[[float], None]) -> bool:
        """Have the step's own forward, which is about to run, compute these rows with its own: all weights are read
        once instead of twice. The result is the same to rounding, as in any batch of the engine's. Only on a CPU
        without compilation, where a step's rows are neither padded nor captured.

        Args:
            done: told afterwards how many milliseconds that took, in proportion to the tokens.

        Returns:
            whether it will; if not, nothing has happened.
        """
        step = _step_context(self._runner)
        total = self._ids.numel() + (step.tokens if step is not None else 0)
        if step is None or total > self._most_tokens():
            return False
        metadata, slots = self._attention(step.rows.followed_by(self._rows), None)
        names, model = self._layers(), self._runner.model
        padding = torch.zeros(total, dtype=torch.bool)
        hooks: list[Any] = []
        started = 0.0

        def enter(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            nonlocal started
            if not step.current():  # that forward never came
                leave()
                return None
            if given.get("inputs_embeds") is not None or given.get("input_ids") is None:  # those have no ids to add to
                leave()
                started = time.perf_counter()
                self()
                done((time.perf_counter() - started) * 1e3)
                return None
            step.put(_Shape(dict.fromkeys(names, metadata), dict.fromkeys(names, slots), padding))
            started = time.perf_counter()
            ids = torch.cat([given["input_ids"][: step.tokens], self._ids])
            positions = torch.cat([given["positions"][: step.tokens], self._positions])
            return args, given | {"input_ids": ids, "positions": positions}

        def finish(module: Any, args: Any, hidden: torch.Tensor) -> torch.Tensor:
            leave()
            step.put(step.shape)
            done((time.perf_counter() - started) * 1e3 * self._ids.numel() / total)
            return hidden[: step.tokens]

        def leave() -> None:
            while hooks:
                hooks.pop().remove()

        hooks.append(model.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(model.register_forward_hook(finish))
        return True

    def _layers(self) -> list[str]:
        return list(self._runner.kv_cache_config.kv_cache_groups[0].layer_names)

    def _most_tokens(self) -> int:
        """What vLLM has made sure of that it fits into memory."""
        return int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens)

    def _attention(self, rows: _Rows, positions: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """Metadata for the attention over some rows, by the runner's own builder, and their slots on the device."""
        device = self._runner.device
        slots, tables = to_device(rows.slots, device), to_device(rows.tables, device)
        return attention_metadata(self._runner, rows.query_starts, rows.seq_lens, tables, slots, positions), slots


def _padded(tables: list[list[int]]) -> torch.Tensor:
    """Block tables as one ``(rows, blocks)`` int32 tensor."""
    padded = torch.zeros((len(tables), max(map(len, tables))), dtype=torch.int32)
    for row, blocks in enumerate(tables):
        padded[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return padded


class _Shape(NamedTuple):
    """What a forward's context says of its tokens, under the names it has there."""

    attn_metadata: Any
    slot_mapping: Any
    is_padding: Any


@dataclass(frozen=True)
class _Step:
    """The forward that vLLM is about to run."""

    context: ForwardContext
    shape: _Shape
    """What the context holds of itself."""
    rows: _Rows

    @property
    def tokens(self) -> int:
        return len(self.rows.slots)

    def current(self) -> bool:
        """Its context is the one in force."""
        return is_forward_context_available() and get_forward_context() is self.context

    def put(self, shape: _Shape) -> None:
        """Make the context say something else."""
        for name, value in shape._asdict().items():
            setattr(self.context, name, value)


def _step_context(runner: Any) -> _Step | None:
    """The forward in whose context this is called, if rows can be added to it."""
    eager = runner.vllm_config.model_config.enforce_eager  # what is compiled or captured may be so for certain sizes
    if torch.device(runner.device).type != "cpu" or not eager or not is_forward_context_available():
        return None
    context = get_forward_context()
    shape = _Shape(context.attn_metadata, context.slot_mapping, context.is_padding)
    if not isinstance(shape.attn_metadata, dict) or not shape.attn_metadata:
        return None
    if context.ubatch_slices is not None or context.dp_metadata is not None:
        return None
    own = next(iter(shape.attn_metadata.values()))
    tokens = own.num_actual_tokens
    padded = shape.is_padding is None or len(shape.is_padding) != tokens
    if padded or own.causal is not True or int(own.query_start_loc[-1]) != tokens:
        return None
    rows = _Rows(own.query_start_loc, own.seq_lens, own.block_table, own.slot_mapping[:tokens])
    return _Step(context, shape, rows)


def logits_of(runner: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Logits ``(tokens, vocabulary)`` of hidden states; ``None`` on ranks without them. All ranks must call."""
    with torch.inference_mode():
        logits: torch.Tensor | None = runner.model.compute_logits(hidden)
        return logits
