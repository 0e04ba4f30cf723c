"""The repair pass joins the step's own forward: what goes in, what comes out, and what happens if it never comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from kvcomm_integrations.connector.worker.forward import VirtualBatch, virtual_batch


class Model(torch.nn.Module):
    """Hidden states that tell of which token they are; remembers what its forwards' contexts said."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ForwardContext] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        context = get_forward_context()
        self.seen.append(SimpleNamespace(**vars(context)))  # type: ignore[arg-type]
        return torch.stack([input_ids, positions], 1).float()


class Builder:
    """Metadata as a builder of vLLM's makes it, as far as it is read."""

    def build(self, common_prefix_len: int, common: Any) -> SimpleNamespace:
        return SimpleNamespace(
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


def make_runner(most_tokens: int = 64) -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cpu"),
        model=Model(),
        attn_groups=[[SimpleNamespace(get_metadata_builder=lambda number: Builder())]],
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])]),
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=most_tokens),
            model_config=SimpleNamespace(enforce_eager=True),
        ),
    )


def rows(runner: Any, ids: list[int], start: int, blocks: list[int]) -> VirtualBatch:
    return virtual_batch(
        runner,
        token_ids=torch.tensor(ids),
        positions=torch.arange(start, start + len(ids)),
        slots=torch.arange(100 + start, 100 + start + len(ids)),
        query_starts=[0, len(ids)],
        seq_lens=[start + len(ids)],
        block_tables=[blocks],
    )


def step_of(runner: Any, ids: list[int], start: int, padding: int = 0) -> ForwardContext:
    own = rows(runner, ids, start, [1, 2, 3])
    return ForwardContext(
        no_compile_layers={},
        attn_metadata={"layer": own._metadata},
        slot_mapping={"layer": own._slots},
        is_padding=torch.zeros(len(ids) + padding, dtype=torch.bool),
    )


def forward(runner: Any, ids: list[int], start: int) -> list[list[float]]:
    hidden = runner.model(
        input_ids=torch.tensor(ids), positions=torch.arange(start, start + len(ids)), inputs_embeds=None
    )
    return [list(row) for row in hidden.tolist()]


def test_all_rows_go_in_and_only_the_steps_own_come_out() -> None:
    runner, told = make_runner(), []
    context = step_of(runner, [7, 8, 9], 20)
    before = dict(vars(context))
    with override_forward_context(context):
        assert rows(runner, [1, 2], 5, [4]).join(told.append)
        assert not runner.model.seen
        assert forward(runner, [7, 8, 9], 20) == [[7, 20], [8, 21], [9, 22]]
    [seen] = runner.model.seen
    metadata = seen.attn_metadata["layer"]
    assert metadata.query_start_loc.tolist() == [0, 3, 5]
    assert metadata.seq_lens.tolist() == [23, 7]
    assert metadata.block_table.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert seen.slot_mapping["layer"].tolist() == [120, 121, 122, 105, 106]
    assert seen.is_padding.tolist() == [False] * 5
    assert vars(context) == before
    assert len(told) == 1
    assert told[0] >= 0


def test_the_next_forward_is_the_steps_own_again() -> None:
    runner = make_runner()
    with override_forward_context(step_of(runner, [7, 8, 9], 20)):
        rows(runner, [1, 2], 5, [4]).join(lambda ms: None)
        forward(runner, [7, 8, 9], 20)
        assert forward(runner, [7, 8, 9], 20) == [[7, 20], [8, 21], [9, 22]]
    assert runner.model.seen[1].slot_mapping["layer"].tolist() == [120, 121, 122]


def test_rows_whose_forward_never_came_join_no_other() -> None:
    runner, told = make_runner(), []
    with override_forward_context(step_of(runner, [7, 8, 9], 20)):
        assert rows(runner, [1, 2], 5, [4]).join(told.append)
    for _ in range(2):
        with override_forward_context(step_of(runner, [6], 3)):
            assert forward(runner, [6], 3) == [[6, 3]]
    assert [len(seen.slot_mapping["layer"]) for seen in runner.model.seen] == [1, 1]
    assert told == []


def test_a_step_that_brings_embeddings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, told, alone = make_runner(), [], []
    monkeypatch.setattr(VirtualBatch, "__call__", lambda self: alone.append(self._ids.tolist()))
    given = {"input_ids": torch.tensor([7]), "positions": torch.tensor([20]), "inputs_embeds": torch.zeros(1, 4)}
    with override_forward_context(step_of(runner, [7], 20)):
        assert rows(runner, [1, 2], 5, [4]).join(told.append)
        assert runner.model(**given).tolist() == [[7, 20]]
        assert runner.model(**given).tolist() == [[7, 20]]
    assert alone == [[1, 2]]
    assert len(told) == 1


def _no_context(runner: Any) -> None:
    return None


def _padded(runner: Any) -> ForwardContext:
    return step_of(runner, [7, 8, 9], 20, padding=1)


def _no_attention(runner: Any) -> ForwardContext:
    return ForwardContext(no_compile_layers={}, attn_metadata=None, slot_mapping={})


def _too_long(runner: Any) -> ForwardContext:
    runner.vllm_config.scheduler_config.max_num_batched_tokens = 4
    return step_of(runner, [7, 8, 9], 20)


def _on_a_gpu(runner: Any) -> ForwardContext:
    context = step_of(runner, [7, 8, 9], 20)
    runner.device = torch.device("cuda")
    return context


def _compiled(runner: Any) -> ForwardContext:
    runner.vllm_config.model_config.enforce_eager = False
    return step_of(runner, [7, 8, 9], 20)


@pytest.mark.parametrize("make", [_no_context, _padded, _no_attention, _too_long, _on_a_gpu, _compiled])
def test_where_nothing_can_join_nothing_happens(make: Any) -> None:
    runner = make_runner()
    batch = rows(runner, [1, 2], 5, [4])
    with override_forward_context(make(runner)):
        assert not batch.join(lambda ms: None)
    assert not runner.model._forward_hooks
    assert not runner.model._forward_pre_hooks
