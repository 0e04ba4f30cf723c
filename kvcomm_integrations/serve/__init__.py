"""vLLM's server with our connector: how it is started and watched, and what its requests go through on their way."""
