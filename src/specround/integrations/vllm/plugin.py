"""The entry point that vLLM loads in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Make our attention backend known under vLLM's name for backends of others, which nobody uses unless asked to.

    A vLLM that is started without a speculator of ours runs as if this package were not installed. The worker, which
    only `llm_kwargs` names, selects the backend and checks the version.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from specround.integrations.vllm.start import use_backend

    use_backend(AttentionBackendEnum.CUSTOM)
