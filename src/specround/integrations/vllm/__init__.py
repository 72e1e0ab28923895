"""Speculators inside released vLLM: `llm_kwargs` says how to start it. Importing this loads neither vLLM nor torch."""

from specround.integrations.vllm.settings import ENVIRONMENT, llm_kwargs, prepare_environment

__all__ = ["ENVIRONMENT", "llm_kwargs", "prepare_environment"]
