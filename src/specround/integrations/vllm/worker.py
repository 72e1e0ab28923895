"""`RoundWorker`: the worker that `--worker-cls` names. It makes our runner and selects our attention backend."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from specround.contract import ConfigError
from specround.integrations.vllm.limits import check_settings
from specround.integrations.vllm.versions import check_version


class RoundWorker(CPUWorker):
    """vLLM's CPU worker with a runner that hosts the round."""

    def init_device(self) -> None:
        """Start the device, then replace the runner.

        Raises:
            ConfigError: The version, a setting or the first runner does not fit.
        """
        check_version()
        check_settings(self.vllm_config)
        if not self.use_v2_model_runner:
            raise ConfigError("VLLM_USE_V2_MODEL_RUNNER", 0, "1: the round is hosted by the V2 runner")
        register_backend(AttentionBackendEnum.CPU_ATTN, "specround.integrations.vllm.attention.RoundBackend")
        super().init_device()
        from specround.integrations.vllm.runner import RoundRunner

        self.model_runner = RoundRunner(self.vllm_config, self.device)
