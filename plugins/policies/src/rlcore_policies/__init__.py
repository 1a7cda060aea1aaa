"""Policy clients for rlcore: OpenAI-compatible endpoints and SGLang's native interface."""
