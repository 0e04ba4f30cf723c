"""The policies by name, with what a planner must know of each, which needs no torch.

A new policy is a file in ``policies/`` (see ``policies/policy.py``) and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyTraits:
    """What a planner must know of a policy. The defaults suit one that learns nothing."""

    class_name: str
    """Its class, in the module of the policy's name."""
    learns: bool = False
    """It derives from ``LearningPolicy``; if not, no dense truth is ever extracted for it."""
    repairs: bool = True
    """The engine may run the repair pass on top of it."""
    rotates: bool = True
    """Keys are rotated to the target position; if not, they keep the rotation of their old one."""
    needs_truth: bool = False
    """It chooses what to recompute by looking at the true KV, so it can only be compared, not used to save time."""
    gates: bool = False
    """``ready`` says whether a content may be loaded, by the entropy criterion of the policy's paper."""
    parts: bool = False
    """It can learn from an example part by part."""
    chains: bool = False
    """It wants references of the agent that consumed the content just before."""


POLICIES = {
    "aligned": PolicyTraits("Aligned"),
    "cacheblend": PolicyTraits("CacheBlend", repairs=False, needs_truth=True),
    "full_share": PolicyTraits("FullShare", repairs=False, rotates=False),
    "kvcmas": PolicyTraits("KVCMAS", learns=True, repairs=False, gates=True, chains=True),
    "kvcomm": PolicyTraits("KVCOMM", learns=True, repairs=False, gates=True),
    "ridge": PolicyTraits("Ridge", learns=True, parts=True),
}
"""By name, which is also the name of the policy's module."""

POLICY_NAMES = tuple(POLICIES)


def policy_traits(name: str) -> PolicyTraits | None:
    """The traits of a policy or of a variant such as ``kvcmas:rank=4``; ``None`` if there is none of that name."""
    return POLICIES.get(name.partition(":")[0])
