"""`KernelRegistry`: which kernel runs for each key, and what a layer can verify with them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from specround.contract import (
    KERNEL_KEYS,
    KernelError,
    KernelProvider,
    LayerDescriptor,
    SpecCapabilities,
    SpecKernel,
    SpecLimit,
    SpecResources,
    min_kind,
)
from specround.kernels.kv_cache.naive import write_kv
from specround.kernels.reference import ReferenceKernels, WriteKV

logger = logging.getLogger(__name__)


class KernelRegistry:
    """Kernels by key: the built-in ones, overlaid by providers in order. Built once per worker.

    Args:
        providers: Factories of kernels by key; a later one wins a key, each override is logged once.
        device_type: Where the kernels run. The built-in ones are plain torch, but for those with a Triton kernel on
            "cuda".

    Attributes:
        write_kv: Writes keys and values on that device; it has no key, as speculation adds nothing to it.

    Raises:
        KernelError: A provider fails, or supplies an unknown key or something that is not a kernel.

    Example:
        >>> KernelRegistry().limit(LayerDescriptor(name="layer 0", verify_key="attention:full/verify")).kind
        'mask'
    """

    def __init__(self, providers: Iterable[KernelProvider] = (), *, device_type: str = "cpu") -> None:
        self._built_in: dict[str, SpecKernel] = ReferenceKernels()
        self.write_kv: WriteKV = write_kv
        if device_type == "cuda":
            self._use_triton()
        self._kernels: dict[str, SpecKernel] = dict(self._built_in)
        if not isinstance(providers, Iterable):
            raise KernelError(f"spec_kernel_providers={providers!r}: must be a sequence of functions")
        for provider in providers:
            self._overlay(provider)

    def _use_triton(self) -> None:
        try:
            from specround.kernels import gpu
        except ImportError as error:
            logger.warning("no Triton kernels, plain torch runs in their place: %s", error)
            return
        self._built_in.update(gpu.triton_kernels())
        self.write_kv = gpu.write_kv

    def _overlay(self, provider: KernelProvider) -> None:
        name = getattr(provider, "__qualname__", repr(provider))
        if not callable(provider):
            raise KernelError(f"spec_kernel_providers has {provider!r}: must be a function that returns kernels by key")
        try:
            kernels = provider()
        except Exception as error:
            raise KernelError(f"provider {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(kernels, Mapping):
            raise KernelError(f"provider {name} returned {kernels!r}: must be a mapping of kernels by key")
        for key, kernel in kernels.items():
            if key not in KERNEL_KEYS:
                known = ", ".join(KERNEL_KEYS)
                raise KernelError(f"provider {name} supplies unknown key {key!r}: known keys are {known}")
            if isinstance(kernel, type) or not isinstance(kernel, SpecKernel):
                needs = "must be an object with supports() and bind()"
                raise KernelError(f"provider {name} supplies {kernel!r} for {key!r}: {needs}")
            if key in self._kernels:
                logger.info("kernel %s: %s overrides %s", key, name, type(self._kernels[key]).__name__)
            self._kernels[key] = kernel

    def get(self, key: str, layer: LayerDescriptor | None = None) -> SpecKernel | None:
        """The kernel of a key, or None when nothing supplies it.

        Args:
            key: One of `KERNEL_KEYS`.
            layer: Who is to run it: a layer that the kernel declines gets the built-in one, for its prompts and chains.
        """
        kernel = self._kernels.get(key)
        if kernel is not None and layer is not None and self._supports(key, kernel, layer).kind == "none":
            return self._built_in.get(key)
        return kernel

    def limit(self, layer: LayerDescriptor) -> SpecLimit:
        """The highest plan kind that every kernel the layer needs supports; a missing or declining kernel chains it."""
        needed = (layer.verify_key, *layer.other_keys, layer.commit_key)
        limits = [self._kernel_limit(key, layer) for key in needed if key is not None]
        kind = min_kind(*(limit.kind for limit in limits))
        return SpecLimit(kind, "; ".join(dict.fromkeys(limit.reason for limit in limits if limit.reason)))

    def capabilities(self, layers: Iterable[LayerDescriptor], settings: Iterable[SpecLimit] = ()) -> SpecCapabilities:
        """What a rank verifies: the minimum over its layers and over settings that lower the kind."""
        return SpecCapabilities.from_limits([*(self.limit(layer) for layer in layers), *settings])

    def bind(self, resources: SpecResources) -> None:
        """Bind every kernel, once also under several keys; paged-token commit is bound only above chains."""
        bound: dict[int, SpecKernel] = {}
        for key, kernel in self._kernels.items():
            if key != "layout:paged_token/commit" or resources.kind != "chain":
                bound[id(kernel)] = kernel
        for kernel in bound.values():
            try:
                kernel.bind(resources)
            except Exception as error:
                name = type(kernel).__name__
                raise KernelError(f"bind() of kernel {name} failed: {type(error).__name__}: {error}") from error

    def _kernel_limit(self, key: str, layer: LayerDescriptor) -> SpecLimit:
        kernel = self._kernels.get(key)
        if kernel is None:
            return SpecLimit("chain", f"no kernel is registered for {key}")
        limit = self._supports(key, kernel, layer)
        return SpecLimit("chain", limit.reason) if limit.kind == "none" else limit

    @staticmethod
    def _supports(key: str, kernel: SpecKernel, layer: LayerDescriptor) -> SpecLimit:
        """What a kernel answers, or an error that names it."""
        asked = f"supports() of kernel {type(kernel).__name__} for {key}, layer {layer.name}"
        try:
            limit = kernel.supports(layer)
        except Exception as error:
            raise KernelError(f"{asked} failed: {type(error).__name__}: {error}") from error
        if not isinstance(limit, SpecLimit):
            raise KernelError(f"{asked} returned {limit!r}: must be a SpecLimit")
        return limit
