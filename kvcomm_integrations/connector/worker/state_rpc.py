"""One worker's share of saving, loading and clearing learned corrections. Answers instead of raising: errors must
cross process borders with their text intact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from kvcomm_integrations.connector.compat import VllmConfig, rank_heads
from kvcomm_integrations.connector.worker.worker import ConnectorWorker
from kvcomm_integrations.errors import KVCommError, StateFileError
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.state.files import read_manifest, read_state, write_state
from kvcomm_integrations.state.learned import LearnedState, give_to, require_saveable, take_from
from kvcomm_integrations.state.manifest import HeadRange, ModelIdentity, tenant_of
from kvcomm_integrations.state.model_identity import config_hash, rope_text, weights_hash


class StateAnswer(TypedDict, total=False):
    """What a worker says of a call. ``error`` is there if it failed, and then nothing was changed."""

    error: str
    share: str
    """File with this rank's share."""
    edges: int
    examples: int


class StateRpc:
    """Carries out calls on one worker.

    Args:
        config: vLLM's configuration.
        worker: whose policy is saved and loaded.
    """

    def __init__(self, config: VllmConfig, worker: ConnectorWorker) -> None:
        self._config = config
        self._worker = worker
        self._identity: ModelIdentity | None = None
        self._identity_of = 0
        """Changes of the weights before ``_identity`` was found out."""
        self._loaded: LearnedState | None = None

    def call(self, method: str, *args: Any) -> StateAnswer:
        """Run one of the methods below; an error of ours becomes its answer."""
        try:
            answer: StateAnswer = getattr(self, method)(*args)
            return answer
        except KVCommError as error:
            return StateAnswer(error=str(error))

    def save(self, path: str, tenant: str | None) -> StateAnswer:
        """Write this rank's heads of all edges, or of one tenant's, to ``share_path``."""
        require_saveable(self._kind)
        policy, heads = self._worker.config.policy, self._heads()
        assert self._worker.cache is not None
        state = take_from(
            self._worker.learner.policies.get(policy) or create_policy(policy),
            self._model(),
            heads,
            layout=self._worker.cache.layout.value,
            options=dict(self._worker.config.policy_options),
        )
        share = share_path(Path(path), heads, state.model.kv_heads)
        manifest = write_state(share, state if tenant is None else state.of_tenant(tenant))
        return StateAnswer(share=str(share), edges=len(manifest.edges), examples=manifest.examples)

    def load(self, path: str, tenant: str | None) -> StateAnswer:
        """Read this rank's heads and check that they are of this model, policy and tenant; keep them for ``apply``."""
        self._loaded = None
        heads, model = self._heads(), self._model()
        manifest = read_manifest(Path(path), max_bytes=self._largest(heads))
        manifest.check_fits(model, self._kind, require_saveable(self._kind), path)
        manifest.check_tenant(tenant, path)
        state = read_state(Path(path), heads=heads, max_bytes=self._largest(heads))
        budget = self._worker.config.state_bytes
        if state.nbytes > budget:
            raise StateFileError(f"{path} needs {state.nbytes} bytes on this worker; state_bytes allows {budget}")
        self._loaded = state
        return StateAnswer(edges=len(manifest.edges), examples=manifest.examples)

    def apply(self, merge: bool) -> StateAnswer:
        """Know what was loaded, in place of what was known of its tenant's edges or (``merge``) in addition to it."""
        state, self._loaded = self._loaded, None
        if state is None:
            raise StateFileError("nothing has been loaded")
        assert self._worker.cache is not None
        with self._worker.learner.relearning(self._worker.config.policy) as policy:
            if state.tenant is not None and not merge:
                for edge in policy.edges():
                    if tenant_of(edge.scope) == state.tenant:
                        policy.forget(edge)
            give_to(policy, state, self._worker.cache.device, merge=merge or state.tenant is not None)
        return StateAnswer(edges=len(state.edges), examples=sum(edge.examples for edge in state.edges))

    def clear(self, tenant: str | None) -> StateAnswer:
        """Forget every edge, or one tenant's."""
        forgotten = 0
        for name in list(self._worker.learner.policies):
            with self._worker.learner.relearning(name) as policy:
                for edge in policy.edges():
                    if tenant is None or tenant_of(edge.scope) == tenant:
                        policy.forget(edge)
                        forgotten += 1
        return StateAnswer(edges=forgotten)

    @property
    def _kind(self) -> str:
        """The engine's policy without its options: they take effect after learning, so states are free of them."""
        return self._worker.config.policy.partition(":")[0]

    def _heads(self) -> HeadRange:
        if self._worker.disabled or self._worker.cache is None or self._worker.rope is None:
            raise StateFileError(f"nothing is learned here: {self._worker.disabled or 'there is no paged cache yet'}")
        if self._config.parallel_config.pipeline_parallel_size > 1:
            raise StateFileError("learned corrections cannot be saved or loaded under pipeline parallelism")
        if self._config.parallel_config.data_parallel_size > 1:
            raise StateFileError(
                "under data parallelism every engine learns on its own, and one file cannot hold that: run replicas as "
                "servers of their own and merge their files"
            )
        first, count = rank_heads(self._config)
        return HeadRange(first=first, count=count)

    def _largest(self, heads: HeadRange) -> int:
        """Most bytes a file for the whole model may have, so that one rank's share can fit into its budget."""
        total = int(self._config.model_config.get_total_num_kv_heads())
        return self._worker.config.state_bytes * -(-total // heads.count) + (64 << 20)

    def _model(self) -> ModelIdentity:
        if not self._worker.weights_named:
            raise StateFileError(
                "the model's weights have been replaced by others than those of a folder: what was learned since "
                "cannot be kept, because a state file says by a hash of the folder's weights what it fits"
            )
        if self._identity is None or self._identity_of != self._worker.weights:
            self._identity_of = self._worker.weights
            cache, rope, model = self._worker.cache, self._worker.rope, self._config.model_config
            assert cache is not None and rope is not None
            self._identity = ModelIdentity(
                name=model.model,
                revision=model.revision or "",
                config=config_hash(model.hf_text_config.to_dict()),
                weights=weights_hash(_folder(model.model, model.revision)),
                dtype=str(cache.dtype).removeprefix("torch."),
                layers=len(cache.layers),
                kv_heads=model.get_total_num_kv_heads(),
                head_dim=cache.head_dim,
                rope=rope_text(rope),
            )
        return self._identity


def _folder(model: str, revision: str | None) -> Path:
    """Where a model's files are on this machine: itself, or the hub's cache if it is a hub id."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return Path(model)


def share_path(path: Path, heads: HeadRange, total: int) -> Path:
    """Where a rank writes: ``path`` itself if it holds every head, else a name beside it by its first head."""
    return path if heads.count == total else path.with_name(f"{path.name}.heads-{heads.first}")
