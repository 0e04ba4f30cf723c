"""Makes policies by name. A policy's module (and with it torch) is imported when the policy is first made.

A name may carry options, as in ``kvcmas:rank=4:gamma=0.5``: such variants run beside the plain policy in one engine.
"""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.traits import POLICIES, POLICY_NAMES

if TYPE_CHECKING:
    from kvcomm_integrations.reuse.policies.policy import Policy


def create_policy(name: str, **options: Any) -> Policy:
    """Make a policy.

    Args:
        name: one of ``POLICY_NAMES``, or a variant of it.
        options: fields of the policy's dataclass; options in the name override them.

    Raises:
        ConfigurationError: no such policy or option, or a value out of range.
    """
    plain, *carried = name.split(":")
    if plain not in POLICIES:
        raise ConfigurationError(f"policy {plain!r} does not exist; choose one of {', '.join(POLICY_NAMES)}")
    policy: type[Policy] = getattr(import_module(f"{__name__}.{plain}"), POLICIES[plain].class_name)
    options |= dict(_option(name, text) for text in carried)
    known = [field.name for field in fields(policy) if field.init]
    for option in options:
        if option not in known:
            choices = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigurationError(f"policy {plain!r} has no option {option!r}; {choices}")
    return policy(**options)


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
