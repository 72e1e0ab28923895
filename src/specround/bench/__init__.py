"""The benchmark behind `specround bench`: speculation off and on, beside transformers, on the same prompts."""

from specround.bench.gate import GateError
from specround.bench.run import run_bench
from specround.bench.settings import BenchSettings

__all__ = ["BenchSettings", "GateError", "run_bench"]
