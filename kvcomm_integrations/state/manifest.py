"""The manifest of a state file, and when two such manifests fit together. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcomm_integrations.errors import StateFileError
from kvcomm_integrations.wire import MAX_NAME, WIRE_VERSION, first_problem

FORMAT = 1
"""Version of the file format; raised whenever older readers would misread a file."""
MAX_EDGES = 4096
MAX_SCOPE = 2048


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadRange(_Record):
    """KV heads ``[first, first + count)`` of the model."""

    first: int = Field(ge=0)
    count: int = Field(ge=1)

    @property
    def end(self) -> int:
        """One past the last head."""
        return self.first + self.count


class ModelIdentity(_Record):
    """Which model's KV the corrections are of."""

    name: str
    """Folder or hub id, as the engine was given it."""
    revision: str = ""
    """Hub revision, where there is one."""
    config: str = ""
    """Hash of the model's configuration."""
    weights: str = ""
    """Hash over samples of the weight files; empty where they were not found."""
    dtype: str
    """Type of the cached KV."""
    layers: int = Field(ge=2)
    kv_heads: int = Field(ge=1)
    """KV heads of the whole model, whatever the number of ranks."""
    head_dim: int = Field(ge=1)
    rope: str = ""
    """The rotation that was taken off the keys."""

    def difference(self, other: ModelIdentity) -> str | None:
        """The first thing in which two models differ, with both values; ``None`` if corrections may be exchanged.

        The same weights in another folder are the same model. Where weights could not be hashed, names and revisions
        have to agree instead.
        """
        weights = ("weights",) if self.weights and other.weights else ("name", "revision")
        for name in ("config", "dtype", "layers", "kv_heads", "head_dim", "rope", *weights):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                models = "" if name == "name" else f" (models {self.name!r} and {other.name!r})"
                return f"{name} {theirs!r}, not {mine!r}{models}"
        return None


class EdgeRecord(_Record):
    """One edge in a file; its tensors are ``<number>.mean`` and ``<number>.scatter``."""

    source: str = Field(max_length=MAX_NAME)
    target: str = Field(max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    scope: str = Field(default="", max_length=MAX_SCOPE)
    examples: int = Field(ge=1, lt=1 << 53)
    """Dense observations learned from."""
    rows: int = Field(ge=1, lt=1 << 53)
    """Tokens they had together."""

    @property
    def tenant(self) -> str | None:
        """Whose edge it is; ``None`` if its scope names nobody."""
        return tenant_of(self.scope)


class StateManifest(_Record):
    """The JSON manifest of a state file."""

    format: int = FORMAT
    wire: int = WIRE_VERSION
    package: str
    """Version of this package that wrote the file."""
    created: str
    """Time of writing, UTC, ISO 8601."""
    model: ModelIdentity
    layout: str = ""
    """Layout of the paged cache it was learned on. For information: corrections do not depend on it."""
    policy: str
    learns: str
    """What the policy's numbers mean; another value is another state."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The policy's options when the file was written. For information: they take effect when a map is solved."""
    tenant: str | None = None
    """The only tenant whose edges are inside; ``None``: every tenant's."""
    heads: HeadRange
    """Heads inside: all of the model's, or one rank's share."""
    edges: tuple[EdgeRecord, ...] = Field(max_length=MAX_EDGES)
    digest: str
    """Hash of the manifest (with this field empty) and of all tensors."""

    @property
    def whole(self) -> bool:
        """Every head of the model is inside."""
        return self.heads == HeadRange(first=0, count=self.model.kv_heads)

    @property
    def examples(self) -> int:
        """Examples of all edges together."""
        return sum(edge.examples for edge in self.edges)

    def check_tenant(self, wanted: str | None, where: str) -> None:
        """Raise `StateFileError` if edges of another tenant are inside than the file says, or than ``wanted``."""
        if wanted is not None and self.tenant != wanted:
            held = "every tenant" if self.tenant is None else f"tenant {self.tenant!r}"
            raise StateFileError(f"{where} holds corrections of {held}, not of tenant {wanted!r} alone")
        for edge in self.edges:
            if self.tenant not in (None, edge.tenant):
                raise StateFileError(
                    f"{where} says it is of tenant {self.tenant!r}, but holds an edge of {edge.tenant!r}: do not use it"
                )

    def check_fits(self, model: ModelIdentity, policy: str, learns: str, where: str) -> None:
        """Raise `StateFileError` if the file was learned on another model or by another policy."""
        if self.policy != policy:
            raise StateFileError(f"{where} was learned by policy {self.policy!r}, not {policy!r}")
        if self.learns != learns:
            raise StateFileError(f"{where} holds {self.learns!r}, but this version of {policy!r} learns {learns!r}")
        difference = model.difference(self.model)
        if difference is not None:
            raise StateFileError(f"{where} was learned on another model: it has {difference}")


def tenant_of(scope: str) -> str | None:
    """The tenant named by an edge's scope (a JSON list of cache salt and tenant), or ``None``."""
    try:
        parts = json.loads(scope) if scope else None
    except ValueError:
        return None
    return parts[1] if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[1], str) else None


def parse_manifest(metadata: Mapping[str, str] | None, where: str) -> StateManifest:
    """Read the manifest from a safetensors file's metadata.

    Raises:
        StateFileError: there is none, it is of another format, or not valid.
    """
    raw = (metadata or {}).get("kvcomm")
    if raw is None:
        raise StateFileError(f"{where} is not a file of learned corrections: it has no kvcomm manifest")
    try:
        parsed = json.loads(raw)
    except ValueError as error:
        raise StateFileError(f"{where}: the manifest is not valid JSON ({error})") from error
    version = parsed.get("format") if isinstance(parsed, dict) else None
    if version != FORMAT:
        raise StateFileError(f"{where} has format {version!r}; this build reads format {FORMAT}")
    try:
        manifest = StateManifest.model_validate(parsed)
    except ValidationError as error:
        raise StateFileError(f"{where}: the manifest is not valid at {first_problem(error, 'manifest')}") from error
    if manifest.heads.end > manifest.model.kv_heads:
        raise StateFileError(
            f"{where} has heads up to {manifest.heads.end} of a model with {manifest.model.kv_heads}: it is damaged"
        )
    return manifest
