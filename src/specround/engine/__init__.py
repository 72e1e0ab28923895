"""The embedded engine: continuous batching of rounds on Hugging Face models, on a CPU or a GPU."""

from specround.engine.config import EngineConfig
from specround.engine.llm import LLM
from specround.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from specround.engine.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestMetrics", "RequestOutput", "SamplingParams"]
