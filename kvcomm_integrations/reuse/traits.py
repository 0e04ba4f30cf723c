"""The policies by name, with what a planner must know of each without importing torch.

A new policy is a file in ``policies/`` and an entry here; every test of policies then runs over it too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyTraits:
    """What distinguishes a policy for whoever plans with it."""

    class_name: str
    """Its class, in the module of the policy's name."""
    repairs: bool = True
    """The engine may run the repair pass on top of it."""
    rotates: bool = True
    """Keys are rotated to the target position. Only ``full_share`` pastes them as they were."""
    learns: bool = True
    """``observe`` does something; if not, no dense truth is ever extracted for it."""
    needs_truth: bool = False
    """It chooses what to recompute by looking at the true KV, so it can only be compared, not used to save time."""
    gates: bool = False
    """``ready`` says whether a content may be loaded, by the entropy criterion of the policy's paper."""
    chains: bool = False
    """It wants references of the agent that consumed the content just before."""


POLICIES = {
    "aligned": PolicyTraits("Aligned", learns=False),
    "cacheblend": PolicyTraits("CacheBlend", repairs=False, learns=False, needs_truth=True),
    "full_share": PolicyTraits("FullShare", repairs=False, rotates=False, learns=False),
    "kvcmas": PolicyTraits("KVCMAS", repairs=False, gates=True, chains=True),
    "kvcomm": PolicyTraits("KVCOMM", repairs=False, gates=True),
    "ridge": PolicyTraits("Ridge"),
}
"""By name, which is also the name of the policy's module."""

POLICY_NAMES = tuple(POLICIES)


def policy_traits(name: str) -> PolicyTraits | None:
    """The traits of a policy or of a variant such as ``kvcmas:rank=4``; ``None`` if there is none of that name."""
    return POLICIES.get(name.partition(":")[0])
