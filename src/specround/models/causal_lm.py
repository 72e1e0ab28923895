"""`CausalModel`: a Hugging Face causal language model as the engine runs it: packed rows in, hidden states out."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import LayerDescriptor, ModelError, SpecLimit
from specround.kernels.reference import AttentionKernel
from specround.kernels.registry import KernelRegistry
from specround.kernels.state_rows import StateMode, StateRows
from specround.kernels.tree_attention.rows import AttentionRows
from specround.models.attention import HOOK_NAME, ForwardContext, KVShape
from specround.models.families import family_of
from specround.models.fusion import FUSED_MODEL_TYPES, FusedDecoder
from specround.models.linear import Projection, Quantization, make_projection
from specround.models.pretrained import Pretrained
from specround.models.probe import install_layers
from specround.models.recurrent.layer import RecurrentLayer, bytes_per_state
from specround.models.tokenizer import Tokenizer


class CausalModel:
    """A loaded model whose attention goes through the hook and whose recurrent modules are mixers of ours.

    Args:
        pretrained: A loaded checkpoint; its module is changed in place.
        name: Prefix of the layers' names in messages and kernels.
        quantization: Pack projections to "int8", "int4" or "w8a8", or None. On a CPU, for the families that run fused.
        state_mode: How recurrent layers keep the states of drafts.

    Raises:
        ModelError: A layer does not call the hook or its mixer exactly once per forward, or not as the configuration
            says.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        name: str = "target",
        quantization: Quantization | None = None,
        state_mode: StateMode = "replay",
    ) -> None:
        self.config = pretrained.config
        self.tokenizer: Tokenizer | None = pretrained.tokenizer
        self.eos_token_ids = pretrained.eos_token_ids
        self.max_model_len = pretrained.max_position_embeddings
        self.name = name
        self._family = family_of(self.config.model_type, pretrained.source.name)
        self._module = pretrained.module
        if self._family.has_attention:
            self._module.set_attn_implementation(HOOK_NAME)
        self._context = ForwardContext()
        installed = install_layers(self._module, self._family, self._context, name)
        self.state_mode = state_mode
        self.layers = installed.attention
        self.recurrent_layers: tuple[RecurrentLayer, ...] = installed.recurrent
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
    def limits(self) -> tuple[SpecLimit, ...]:
        """What the mixers of recurrent layers declare that they verify."""
        return tuple(layer.limit for layer in self.recurrent_layers)

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Memory of one state block and of one row-buffer slot, in bytes, over all recurrent layers."""
        sizes = [bytes_per_state(layer.shape, self.dtype) for layer in self.recurrent_layers]
        return sum(block for block, _ in sizes), sum(row for _, row in sizes)

    @property
    def descriptors(self) -> tuple[LayerDescriptor, ...]:
        """What the kernel registry needs to know about each layer: attention layers, then recurrent ones."""
        return self.attention_descriptors + tuple(layer.descriptor(self.state_mode) for layer in self.recurrent_layers)

    @property
    def attention_descriptors(self) -> tuple[LayerDescriptor, ...]:
        """Those of the layers that `kv_shapes` describes, in the same order."""
        return tuple(
            LayerDescriptor(
                name=f"{self.name}.{layer.block}",
                verify_key="attention:full/verify" if layer.window is None else "attention:sliding/verify",
                window=layer.window,
                has_sinks=layer.has_sinks,
                softcap=layer.softcap,
            )
            for layer in self.layers
        )

    def named_parameters(self) -> dict[str, Tensor]:
        """Weights by their checkpoint name, shared; those that were packed are not among them."""
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: weight for name, weight in every if weight.numel()}

    def bind(self, registry: KernelRegistry, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Give every attention layer its kernel and its `(key, value)` cache, in layer order."""
        descriptors = self.attention_descriptors
        for layer, descriptor, (key_cache, value_cache) in zip(self.layers, descriptors, caches, strict=True):
            kernel: AttentionKernel = registry.get(descriptor.verify_key, descriptor)  # type: ignore[assignment]
            layer.bind(kernel, registry.write_kv, key_cache, value_cache)

    def bind_states(self, registry: KernelRegistry, num_blocks: int, num_row_slots: int) -> None:
        """Allocate the recurrent layers' caches and take their kernels.

        Args:
            registry: Which kernels run.
            num_blocks: State blocks, the null block included.
            num_row_slots: Row-buffer slots, the null slot included; 0 in mode "slots".
        """
        like = self._module.lm_head.weight
        for layer in self.recurrent_layers:
            layer.bind(registry, self.state_mode, num_blocks, num_row_slots, like)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        rows: AttentionRows,
        states: StateRows | None = None,
    ) -> Tensor:
        """Run packed rows, write their KV and step their states.

        Args:
            input_ids: `[N]` int64.
            positions: `[N]` int64, rotary positions, or `[3, N]` for models that rotate by time, height and width.
            slots: `[N]` int64, flat cache slots, 0 = padding.
            rows: What each row sees.
            states: Which state each row starts from; needed by models with recurrent layers.

        Returns:
            Hidden states `[N, H]` after the final norm.
        """
        assert states is not None or not self.recurrent_layers
        self._context.rows, self._context.slots, self._context.states = rows, slots, states
        if self._fused is not None:
            return self._fused(input_ids, positions)
        position_ids = positions[None] if positions.ndim == 1 else positions[:, None]
        output = self._module.base_model(input_ids=input_ids[None], position_ids=position_ids, use_cache=False)
        hidden = output.last_hidden_state[0]
        assert isinstance(hidden, Tensor)
        return hidden.to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[M, V]` of hidden states `[M, H]`, with the family's final scaling or soft cap."""
        return self._family.final_logits(self.config, self._head(hidden))
