"""Host to device and back without waiting. Pinned memory is reused only once the copies that read it are done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Uploader:
    """Uploads lists of integers.

    Args:
        device: Target of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, values: Sequence[int]) -> Tensor:
        """`[len(values)]` int64 on the device."""
        source = torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cpu":
            return source
        return source.pin_memory().to(self.device, non_blocking=True)


class Download:
    """Device tensors on their way to the host.

    Args:
        tensors: Copied when this is created, in stream order.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """The host copies, once they are complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
