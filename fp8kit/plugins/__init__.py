"""Implementations of kernels from outside: what a plugin is made of, how it is found, how it is chosen.

A plugin is a module with ``register(registry)``, named by an entry point of the group ``fp8kit.plugins`` or
by FP8KIT_PLUGIN_MODULES. It registers an ``OpImpl`` for each kernel of the contract
(``fp8kit.backends.protocol``) that it implements; policies choose among all. Names and defaults are those of
TransformerEngine-FL's plugin system where it has them. docs/plugins.md is the manual.
"""

from fp8kit.backends.discovery import PLUGIN_GROUP, PLUGIN_MODULES_ENV, Discovered, discover_plugin
from fp8kit.backends.dispatch import engines, get_default_manager, registry, reset_default_manager
from fp8kit.backends.manager import OpManager
from fp8kit.backends.policy import (
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    VALID_PREFER_VALUES,
    SelectionPolicy,
    get_policy,
    policy_context,
    policy_from_env,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from fp8kit.backends.protocol import KERNELS, SERVES, signature
from fp8kit.backends.registry import (
    PRIORITY,
    CannotTake,
    Kind,
    OpImpl,
    OpRegistry,
    OpRegistrySnapshot,
    check_signature,
    match_token,
)
from fp8kit.plugins.cost import DispatchCost, dispatch_cost
from fp8kit.plugins.explanation import Explanation, Row, explain, get_discovered_plugin, listing

__all__ = [
    "KERNELS",
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "PRIORITY",
    "SERVES",
    "VALID_PREFER_VALUES",
    "CannotTake",
    "Discovered",
    "DispatchCost",
    "Explanation",
    "Kind",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "Row",
    "SelectionPolicy",
    "check_signature",
    "discover_plugin",
    "dispatch_cost",
    "engines",
    "explain",
    "get_default_manager",
    "get_discovered_plugin",
    "get_policy",
    "listing",
    "match_token",
    "policy_context",
    "policy_from_env",
    "registry",
    "reset_default_manager",
    "reset_global_policy",
    "set_global_policy",
    "signature",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
