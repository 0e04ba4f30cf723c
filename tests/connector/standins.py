"""Stand-ins for vLLM's configuration, and real vLLM requests, for tests of the connector that start no engine."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.connector.metadata import WorkerReport
from kvcomm_integrations.connector.scheduler import ConnectorScheduler
from kvcomm_integrations.wire import WIRE_KEY

BLOCK = 16
LAYERS = 2
BYTES_PER_TOKEN = LAYERS * 2 * 1 * 4 * 4
"""Keys and values, one head of size 4, float32."""

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)
_ids = count()


def spec(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32, **changes}
    )


def cache_config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=["l"] * LAYERS) for s in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups)


def engine_config(*, ranks: int = 1, **changes: Any) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=ranks),
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def make_request(
    prompt: list[int],
    params: Any = None,
    *,
    salt: str | None = None,
    max_tokens: int = 64,
    request_id: str | None = None,
    lora: LoRARequest | None = None,
) -> Request:
    extra = None if params is None else {"kv_transfer_params": {WIRE_KEY: params}}
    return Request(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=HASHER,
        lora_request=lora,
    )


def exact_hashes(request: Request) -> list[bytes]:
    """The chain that a plain request with the same tokens and salt would have."""
    plain = make_request(list(request.all_token_ids), salt=request.cache_salt, lora=request.lora_request)
    return list(plain.block_hashes)


def segment(kind: str, start: int, end: int, name: str = "") -> dict[str, Any]:
    return {"kind": kind, "start": start, "end": end, **({"name": name} if name else {})}


def make_half(*, ranks: int = 1, repair: bool = True, verified: bool = True, **options: Any) -> ConnectorScheduler:
    """A scheduler half whose workers have reported for duty."""
    defaults: dict[str, Any] = {"audit_rate": 0.0, "learn_rate": 0.0, "min_segment_tokens": 4, "repair_depth": 4}
    half = ConnectorScheduler(engine_config(ranks=ranks), cache_config(), ReuseConfig(**{**defaults, **options}))
    half.update_connector_output(
        WorkerReport(verified=verified, repair_known=True, repair_refusal=None if repair else "no runner")
    )
    return half


class Engine:
    """Walks requests through a scheduler half as vLLM does, one at a time."""

    def __init__(self, half: ConnectorScheduler) -> None:
        self.half = half
        self.tables: dict[str, tuple[int, ...]] = {}
        self._blocks = count(1)
        half.block_ids = lambda req_id: self.tables[req_id]

    def admit(self, request: Request, exact: int = 0) -> int | None:
        """Match and allocate; the number of external tokens."""
        external = self.half.get_num_new_matched_tokens(request, exact)
        if external is not None:
            self.allocate(request, external)
            request.num_computed_tokens = exact + external
            request.status = RequestStatus.RUNNING
        return external

    def allocate(self, request: Request, external: int) -> None:
        need = -(-(request.num_tokens + 1) // BLOCK)
        self.tables[request.request_id] = tuple(next(self._blocks) for _ in range(need))
        self.half.update_state_after_alloc(request, self.tables[request.request_id], external)

    def step(self, **scheduled: int) -> Any:
        return self.half.build_connector_meta(SimpleNamespace(num_scheduled_tokens=scheduled))  # type: ignore[arg-type]

    def prefill(self, request: Request) -> Any:
        """One step that computes the rest of the prompt."""
        rest = request.num_prompt_tokens - request.num_computed_tokens
        meta = self.step(**{request.request_id: rest})
        request.num_computed_tokens += rest
        return meta

    def obey(self, meta: Any) -> None:
        """Acknowledge every harvest of a step for all ranks."""
        from kvcomm_integrations.planning.jobs import LoadResult

        self.half.update_connector_output(
            WorkerReport(
                stored={job.ref_id: self.half.index.ranks for job in meta.harvests},
                loads={job.req_id: LoadResult(1.0, 1.0) for job in meta.loads},
            )
        )

    def finish(self, request: Request, answer: list[int], *, status: Any = RequestStatus.FINISHED_STOPPED) -> Any:
        request.append_output_token_ids(answer)
        request.num_computed_tokens = request.num_tokens - 1
        request.status = status
        return self.half.request_finished(request, list(self.tables.get(request.request_id, ())))

    def run(self, request: Request, answer: list[int]) -> tuple[Any, dict[str, Any]]:
        """A whole request; the step with its load, and its report."""
        self.half.on_new_request(request)
        assert self.admit(request) is not None
        meta = self.prefill(request)
        self.obey(meta)
        _, out = self.finish(request, answer)
        self.obey(self.step())
        assert out is not None
        return meta, out[WIRE_KEY]
