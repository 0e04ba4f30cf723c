"""The HTTP engine: a vLLM server somewhere else, behind the same interface as the engine in this process."""
