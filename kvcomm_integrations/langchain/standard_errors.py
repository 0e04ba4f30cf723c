"""Our errors as LangChain's own types too, by which middleware decides to compact, to try again or to give up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions

from kvcomm_integrations.errors import (
    ConfigurationError,
    ContextOverflowError,
    EngineError,
    KVCommError,
    MissingDependencyError,
    RequestRefusedError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnsupportedModelError,
    WireError,
)

_BY_TYPE: tuple[tuple[type[Exception], str], ...] = (
    (ContextOverflowError, "ContextOverflowError"),
    (ServerTimeoutError, "ModelTimeoutError"),
    (TimeoutError, "ModelTimeoutError"),
    (ServerUnreachableError, "ModelConnectionError"),
    (RequestRefusedError, "ModelInvalidRequestError"),
    (ConfigurationError, "ModelInvalidRequestError"),
    (WireError, "ModelInvalidRequestError"),
    (UnsupportedModelError, "ModelError"),
    (MissingDependencyError, "ModelError"),
)
_BY_STATUS = {
    401: "ModelAuthenticationError",
    403: "ModelPermissionDeniedError",
    404: "ModelNotFoundError",
    429: "ModelRateLimitError",
}


@contextmanager
def standard_errors() -> Iterator[None]:
    """Raise what is raised inside as an error that is of our type and of LangChain's.

    Where the installed ``langchain-core`` does not have such a type, ours is raised as it is.
    """
    try:
        yield
    except (KVCommError, TimeoutError) as error:
        standard = getattr(exceptions, _name(error), None)
        if standard is None or isinstance(error, standard):
            raise
        both = type(type(error).__name__, (type(error), standard), {"__module__": type(error).__module__})
        made = both.__new__(both, *error.args)
        made.args = error.args
        made.__dict__.update(error.__dict__)
        raise made from error


def _name(error: Exception) -> str:
    """The name of LangChain's type for an error; empty if there is none."""
    for kind, name in _BY_TYPE:
        if isinstance(error, kind):
            return name
    if isinstance(error, ServerError):
        status = error.status
        if status is None:  # the server does not fit, and will not the next time
            return "ModelInvalidRequestError"
        return _BY_STATUS.get(status, "ModelAPIError" if status >= 500 else "ModelInvalidRequestError")
    if isinstance(error, EngineError):
        return "ModelAPIError" if error.worth_retrying else "ModelError"
    return ""
