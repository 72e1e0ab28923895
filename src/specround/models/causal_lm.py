"""`CausalModel`: a Hugging Face causal language model as the engine runs it: packed rows in, hidden states out."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import LayerDescriptor, ModelError
from specround.kernels.reference import AttentionKernel
from specround.kernels.registry import KernelRegistry
from specround.kernels.tree_attention.rows import AttentionRows
from specround.models.attention import HOOK_NAME, ForwardContext, KVShape
from specround.models.families import family_of
from specround.models.fusion import FUSED_MODEL_TYPES, FusedDecoder
from specround.models.linear import Projection, Quantization, make_projection
from specround.models.pretrained import Pretrained
from specround.models.probe import install_layers
from specround.models.tokenizer import Tokenizer


class CausalModel:
    """A loaded model whose attention goes through the hook.

    Args:
        pretrained: A loaded checkpoint; its module is changed in place.
        name: Prefix of the layers' names in messages and kernels.
        quantization: Pack projections to "int8" or "int4", or None. On a CPU, for the families that run fused.

    Raises:
        ModelError: A layer does not call the hook exactly once per forward, or not as the configuration says.
    """

    def __init__(self, pretrained: Pretrained, name: str = "target", quantization: Quantization | None = None) -> None:
        self.config = pretrained.config
        self.tokenizer: Tokenizer | None = pretrained.tokenizer
        self.eos_token_ids = pretrained.eos_token_ids
        self.max_model_len = pretrained.max_position_embeddings
        self.name = name
        self._family = family_of(self.config.model_type, pretrained.source.name)
        self._module = pretrained.module
        self._module.set_attn_implementation(HOOK_NAME)
        self._context = ForwardContext()
        self.layers = install_layers(self._module, self._family, self._context)
        self._fused: FusedDecoder | None = None
        self._head: Projection = self._module.lm_head
        if self.config.model_type in FUSED_MODEL_TYPES:
            self._fused = FusedDecoder(self._module.model, self.config, self.layers, quantization)
            self._head = make_projection(self._module.lm_head.weight.data, None, quantization)
        elif quantization is not None:
            known = ", ".join(FUSED_MODEL_TYPES)
            raise ModelError(
                "quantization", quantization, f"None for model type {self.config.model_type!r}, not of {known}"
            )

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of the logits."""
        return int(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the KV."""
        dtype = self._module.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each attention layer stores per token."""
        return tuple(layer.shape for layer in self.layers if layer.shape is not None)

    @property
    def descriptors(self) -> tuple[LayerDescriptor, ...]:
        """What the kernel registry needs to know about each layer."""
        return tuple(
            LayerDescriptor(
                name=f"{self.name}.{layer.index}",
                verify_key="attention:full/verify" if layer.window is None else "attention:sliding/verify",
                window=layer.window,
                has_sinks=layer.has_sinks,
                softcap=layer.softcap,
            )
            for layer in self.layers
        )

    def named_parameters(self) -> dict[str, Tensor]:
        """Weights by their checkpoint name, shared."""
        return dict(self._module.named_parameters(remove_duplicate=False))

    def bind(self, registry: KernelRegistry, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Give every layer its kernel and its `(key, value)` cache, in layer order."""
        for layer, descriptor, (key_cache, value_cache) in zip(self.layers, self.descriptors, caches, strict=True):
            kernel: AttentionKernel = registry.get(descriptor.verify_key)  # type: ignore[assignment]
            layer.bind(kernel, key_cache, value_cache)

    def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor, rows: AttentionRows) -> Tensor:
        """Run packed rows and write their KV.

        Args:
            input_ids: `[N]` int64.
            positions: `[N]` int64, rotary positions.
            slots: `[N]` int64, flat cache slots, 0 = padding.
            rows: What each row sees.

        Returns:
            Hidden states `[N, H]` after the final norm.
        """
        self._context.rows, self._context.slots = rows, slots
        if self._fused is not None:
            return self._fused(input_ids, positions)
        output = self._module.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden = output.last_hidden_state[0]
        assert isinstance(hidden, Tensor)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[M, V]` of hidden states `[M, H]`, with the family's final scaling or soft cap."""
        return self._family.final_logits(self.config, self._head(hidden))
