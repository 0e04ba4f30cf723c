"""Models with arguments bound to them, which LangChain's own wrappers would lose (langchain#30983).

Who asks (agent, session, tenant, mode, policy) is written into a copy of the model itself, so that it is still there if
a binding is taken off. Everything else stays in the binding, which tools and schemas are added to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableBinding, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase, RunnableSerializable
from langchain_core.runnables.configurable import DynamicRunnable

from kvcomm_integrations.chat.model_settings import ReuseArguments, checked
from kvcomm_integrations.langchain.structured import Method, structured_model


class Bindable(RunnableSerializable[LanguageModelInput, AIMessage]):
    """What the model and everything made of it have in common: each way of wrapping it keeps what is bound."""

    def bind(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Runnable.bind``. ``kvcomm`` is added to what was bound before, field by field.

        Raises:
            ConfigurationError: an unknown field of ``kvcomm``, or a value that cannot work.
        """
        caller, others = split_caller(kwargs)
        if caller:
            return with_caller(self, caller).bind(**others)
        return _kept(super().bind(**others))

    def with_config(self, *args: Any, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Runnable.with_config``."""
        return _kept(super().with_config(*args, **kwargs))

    def with_retry(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Runnable.with_retry``."""
        return _kept(super().with_retry(**kwargs))

    def with_fallbacks(self, *args: Any, **kwargs: Any) -> RunnableWithFallbacks[LanguageModelInput, AIMessage]:
        """See ``Runnable.with_fallbacks``."""
        made = super().with_fallbacks(*args, **kwargs)
        return BoundFallbacks(**{name: getattr(made, name) for name in type(made).model_fields})

    def with_listeners(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Runnable.with_listeners``."""
        return _kept(super().with_listeners(**kwargs))

    def with_alisteners(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Runnable.with_alisteners``."""
        return _kept(super().with_alisteners(**kwargs))

    def with_types(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Runnable.with_types``."""
        return _kept(super().with_types(**kwargs))

    def configurable_fields(self, **kwargs: Any) -> RunnableSerializable[LanguageModelInput, AIMessage]:
        """See ``RunnableSerializable.configurable_fields``."""
        return _kept(super().configurable_fields(**kwargs))

    def configurable_alternatives(
        self, *args: Any, **kwargs: Any
    ) -> RunnableSerializable[LanguageModelInput, AIMessage]:
        """See ``RunnableSerializable.configurable_alternatives``."""
        return _kept(super().configurable_alternatives(*args, **kwargs))


class BoundModel(Bindable, RunnableBinding[LanguageModelInput, AIMessage]):  # type: ignore[misc]  # its __getattr__
    """A model with arguments, a config, retries or configurable fields round it."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``ChatKVComm.bind_tools``; what was bound before stays."""
        return _onto(self, lambda model: model.bind_tools(tools, **kwargs))

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """See ``ChatKVComm.with_structured_output``; what was bound before stays."""
        model = cast(BaseChatModel, self)  # of which only bind and bind_tools are used
        return structured_model(model, schema, method=method, include_raw=include_raw, strict=strict, extra=kwargs)

    def configurable_fields(self, **kwargs: Any) -> RunnableSerializable[LanguageModelInput, AIMessage]:
        """See ``RunnableSerializable.configurable_fields``: the fields are the model's."""
        inner: Any = self.bound
        if isinstance(inner, RunnableBindingBase) and not isinstance(inner, BoundModel):  # retries
            made = inner.model_copy(update={"bound": BoundModel(bound=inner.bound).configurable_fields(**kwargs)})
        else:
            made = inner.configurable_fields(**kwargs)
        return self.model_copy(update={"bound": made})

    def __getattr__(self, name: str) -> Any:
        """What a wrapper between here and the model does not have is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(_innermost(self), name)

    @classmethod
    def lc_id(cls) -> list[str]:
        """Written as the binding it inherits from, which every LangChain can read."""
        return RunnableBinding.lc_id()


class BoundFallbacks(Bindable, RunnableWithFallbacks[LanguageModelInput, AIMessage]):
    """A model with others to fall back to. What is bound to it is bound to each; each binds tools in its own way."""

    def bind(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """See ``Bindable.bind``. Who asks means nothing to models that are not ours."""
        caller, others = split_caller(kwargs)
        return _each(with_caller(self, caller), lambda step: step.bind(**others))

    @classmethod
    def lc_id(cls) -> list[str]:
        """Written as what it inherits from."""
        return RunnableWithFallbacks.lc_id()


def split_caller(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What bound keywords say of the caller and of reuse, as fields of the model; and the other keywords.

    Raises:
        ConfigurationError: an unknown field of ``kvcomm``, or a value that cannot work.
    """
    others = {name: value for name, value in kwargs.items() if name not in ("kvcomm", "mode", "policy")}
    said = {name: kwargs[name] for name in ("mode", "policy") if kwargs.get(name) is not None}
    caller = checked(ReuseArguments, {**said, **(kwargs.get("kvcomm") or {})}, "fields of kvcomm")
    return caller.model_dump(exclude_none=True), others


def with_caller(step: Any, caller: Mapping[str, Any]) -> Any:
    """The same chain, with fields written into a copy of every model of ours in it."""
    match step:
        case RunnableBindingBase():
            return step.model_copy(update={"bound": with_caller(step.bound, caller)})
        case DynamicRunnable():
            inner: dict[str, Any] = {"default": with_caller(step.default, caller)}
            if others := getattr(step, "alternatives", None):
                inner["alternatives"] = {
                    name: with_caller(other, caller) if isinstance(other, Runnable) else other
                    for name, other in others.items()
                }
            return step.model_copy(update=inner)
        case RunnableWithFallbacks():
            return _each(step, lambda member: with_caller(member, caller))
        case ReuseArguments():
            return step.model_copy(update=dict(caller))
    return step


def _each(step: Any, change: Callable[[Any], Any]) -> Any:
    members = {"runnable": change(step.runnable), "fallbacks": [change(other) for other in step.fallbacks]}
    return step.model_copy(update=members)


def _onto(step: Any, change: Callable[[Any], Any]) -> Any:
    """A chain with what ``change`` binds to a model put round it, or into each of the models it may fall back to."""
    inner = _innermost(step)
    if not isinstance(inner, RunnableWithFallbacks):
        return step.bind(**change(inner).kwargs)
    if step is inner:
        return change(step)
    return step.model_copy(update={"bound": _onto(step.bound, change)})


def _innermost(step: Any) -> Any:
    """The model in a chain of wrappers; with fallbacks, what holds them."""
    while isinstance(step, (RunnableBindingBase, DynamicRunnable)):
        step = step.bound if isinstance(step, RunnableBindingBase) else step.default
    return step


def _kept(made: Any) -> Any:
    """A wrapper that LangChain made, as one that keeps what is bound."""
    if isinstance(made, Bindable):
        return made
    if isinstance(made, RunnableBinding):
        return BoundModel(**{name: getattr(made, name) for name in type(made).model_fields})
    return BoundModel(bound=made)
