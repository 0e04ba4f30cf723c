"""LangChain and LangGraph: ``ChatKVComm``, a chat model whose agents share KV caches."""

from kvcomm_integrations.langchain.chat_models import ChatKVComm

__all__ = ["ChatKVComm"]
