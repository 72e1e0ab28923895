"""`RoundGPUWorker`: the worker that `--worker-cls` names on a CUDA device."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from specround.contract import ConfigError
from specround.integrations.vllm.runner import RoundRunner
from specround.integrations.vllm.start import check_start, use_backend


class RoundGPUWorker(Worker):
    """vLLM's GPU worker with a runner that hosts the round."""

    def init_device(self) -> None:
        """Start the device; `_make_model_runner` is asked for the runner.

        Raises:
            ConfigError: The version, a setting or the attention backend does not fit.
        """
        check_start(self.vllm_config, is_v2=self.use_v2_model_runner)
        attention = self.vllm_config.attention_config
        if attention.backend is not AttentionBackendEnum.CUSTOM or attention.backend_per_kind:
            found = attention.backend_per_kind or attention.backend
            raise ConfigError("attention_config.backend", found, "'CUSTOM', which llm_kwargs fills in")
        use_backend(AttentionBackendEnum.CUSTOM)
        # vLLM would warm up with requests of its own, which no scheduler announced to the speculator.
        self.vllm_config.kernel_config.enable_jit_warmup = False
        super().init_device()

    def _make_model_runner(self) -> Any:
        """The runner."""
        return RoundRunner(self.vllm_config, self.device)
