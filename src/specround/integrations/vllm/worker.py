"""`RoundWorker`: the worker that `--worker-cls` names on a CPU."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from specround.integrations.vllm.runner import RoundRunner
from specround.integrations.vllm.start import check_start, use_backend


class CPURoundRunner(RoundRunner, CPUModelRunner):
    """`RoundRunner` with what vLLM's CPU runner adds."""


class RoundWorker(CPUWorker):
    """vLLM's CPU worker with a runner that hosts the round."""

    def init_device(self) -> None:
        """Start the device, then replace the runner.

        Raises:
            ConfigError: The version, a setting or the first runner does not fit.
        """
        check_start(self.vllm_config, is_v2=self.use_v2_model_runner)
        use_backend(AttentionBackendEnum.CPU_ATTN)
        super().init_device()
        self.model_runner = CPURoundRunner(self.vllm_config, self.device)
