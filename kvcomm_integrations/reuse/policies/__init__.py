"""The policies by name. A new one is a file in this folder and a line in ``_HOME``; it is then tested with all others.

A name may carry options, as in ``kvcmas:rank=4:gamma=0.5``: such variants run beside the plain policy in one engine.
Nothing is imported before a policy is asked for, so this package costs nothing to import.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcomm_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from kvcomm_integrations.reuse.policies.base import Policy

_HOME = {
    "aligned": "Aligned",
    "cacheblend": "CacheBlend",
    "full_share": "FullShare",
    "kvcmas": "KVCMAS",
    "kvcomm": "KVCOMM",
    "ridge": "Ridge",
}
"""Policy name, which is also the name of its module, and its class."""

POLICY_NAMES = tuple(_HOME)


class PolicyTraits(NamedTuple):
    """What a caller has to know of a policy without making one; see the class variables of ``Policy``."""

    repairs: bool
    rotates: bool
    learns: bool
    needs_truth: bool = False
    gates: bool = False
    chains: bool = False


def create_policy(name: str, **options: Any) -> Policy:
    """Make a policy.

    Args:
        name: one of ``POLICY_NAMES``, or a variant of it.
        options: fields of the policy's dataclass; what the name carries goes before them.

    Raises:
        ConfigurationError: no such policy or option, or a value out of range.
    """
    plain, *carried = name.split(":")
    policy = _load(plain)
    if policy is None:
        raise ConfigurationError(f"policy {plain!r} does not exist; choose one of {', '.join(POLICY_NAMES)}")
    options |= dict(_option(name, text) for text in carried)
    known = [field.name for field in fields(policy) if field.init]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            choices = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigurationError(f"policy {plain!r} has no option {option!r}; {choices}")
    return policy(**options)


@lru_cache(maxsize=256)
def policy_traits(name: str) -> PolicyTraits | None:
    """The traits of a policy or a variant of it, or ``None`` if there is none of that name."""
    policy = _load(name.partition(":")[0])
    if policy is None:
        return None
    return PolicyTraits(*(getattr(policy, trait) for trait in PolicyTraits._fields))


def _option(name: str, text: str) -> tuple[str, Any]:
    option, sign, value = text.partition("=")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = None
    if not option or not sign or not isinstance(parsed, int | float):
        raise ConfigurationError(
            f"{text!r} in policy {name!r} is not an option; write NAME:OPTION=VALUE, the value a number, true or false"
        )
    return option, parsed


def _load(name: str) -> type[Policy] | None:
    if name not in _HOME:
        return None
    return getattr(import_module(f"{__name__}.{name}"), _HOME[name])
