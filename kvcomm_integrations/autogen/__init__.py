"""AutoGen: ``KVCommChatCompletionClient``, a model client whose agents share KV caches."""

try:
    from kvcomm_integrations.autogen.client import KVCommChatCompletionClient
    from kvcomm_integrations.autogen.client_config import KVCommClientConfig
    from kvcomm_integrations.autogen.identity import session_scope
except ModuleNotFoundError as err:
    if (err.name or "").partition(".")[0] != "autogen_core":
        raise
    from kvcomm_integrations.errors import MissingDependencyError

    raise MissingDependencyError(
        "KVCommChatCompletionClient needs the package 'autogen_core', which is not installed: "
        "pip install 'kvcomm-integrations[autogen]'",
        name=err.name,
    ) from err

__all__ = ["KVCommChatCompletionClient", "KVCommClientConfig", "session_scope"]
