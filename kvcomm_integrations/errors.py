"""Errors a user can meet. Every message names the offending value and a remedy. Imports nothing of ours."""

from __future__ import annotations


class KVCommError(Exception):
    """Base class of every error raised on purpose by this package."""


class ConfigurationError(KVCommError, ValueError):
    """A setting has a value that cannot work; the message names it and says what to use instead."""


class MissingDependencyError(KVCommError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class UnsupportedModelError(KVCommError):
    """The model or its cache layout cannot be reused (MLA, sliding window, unknown layout, unknown RoPE)."""


class ContextOverflowError(KVCommError, ValueError):
    """The prompt does not fit into the model's context; the message names tokens and limit."""


class EngineError(KVCommError, RuntimeError):
    """The engine could not be started, died, or refused a request."""

    worth_retrying = True
    """The same request may succeed if it is sent again."""


class EngineClosedError(EngineError):
    """A call reached an engine that has been closed."""

    worth_retrying = False


class EngineForkedError(EngineError):
    """A forked child used what only its parent can use: an engine in process, or an answer that was begun there."""

    worth_retrying = False


class RequestRefusedError(EngineError):
    """The engine is there and refuses this request; it would refuse it again."""

    worth_retrying = False


class ServerError(EngineError):
    """A server cannot be reached, refuses a request, or fails. What may be tried again has been (``HttpConfig``)."""

    worth_retrying = False

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Its HTTP status, 500 for an answer that broke off; ``None``: it does not fit this client."""


class ServerUnreachableError(ServerError):
    """There is no connection to the server, or it broke off."""


class ServerTimeoutError(ServerError):
    """The server said nothing for too long, or has no connection to spare."""


class WireError(KVCommError, ValueError):
    """``kv_transfer_params["kvcomm"]`` is not valid; such a request is served densely or refused."""


class StateFileError(KVCommError, ValueError):
    """A file of learned corrections is damaged, too large, or belongs to another model, policy, format or tenant."""
