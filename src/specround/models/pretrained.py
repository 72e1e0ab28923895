"""Load a checkpoint into a Hugging Face module: complete, exact, quiet, and without running anything it contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from specround.contract.errors import ModelError
from specround.models.sources import ModelSource
from specround.models.weights import SafetensorsWeights, WeightSource, read_json_object

if TYPE_CHECKING:
    from specround.models.tokenizer import Tokenizer

SUPPORTED_MODEL_TYPES: Final = ("llama",)
SUPPORTED_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
"""Tables that depend on positions alone; "dynamic" and "longrope" let one request's length change another's logits."""

Progress = Callable[[int, int, str], None]
"""Called as (tensors done, tensors in all, name of the tensor just loaded)."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # recomputed from the config; old checkpoints store it per layer


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A loaded model.

    Attributes:
        module: The Hugging Face causal language model, in eval mode, without gradients.
        config: Its configuration.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
        eos_token_ids: Ids that end a generation, in the checkpoint's order; empty when it names none.
        max_position_embeddings: The longest sequence, in tokens.
        source: Where it came from.
    """

    module: Any
    config: Any
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    source: ModelSource


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """A checkpoint before any weight is read: the parts in which directories and GGUF files differ."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    weights: WeightSource
    tokenizer: Callable[[int], Tokenizer | None]  # model vocabulary size -> tokenizer


def load_pretrained(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    *,
    on_progress: Progress | None = None,
) -> Pretrained:
    """Load weights, configuration and tokenizer.

    Names and shapes are checked against the configuration before memory is allocated: every weight of the model must be
    in the checkpoint and the other way round. Weights are read and converted one at a time. Code in a checkpoint is
    never run and pickles are never opened.

    Args:
        source: From `resolve_model`.
        dtype: Type of the weights, from `resolve_dtype`.
        device: Where the weights go.
        on_progress: Called after each tensor.

    Returns:
        The loaded model; tied embeddings share one tensor.

    Raises:
        ModelError: Unsupported model type, missing or corrupt file, missing, unexpected or mis-shaped weight; names it.

    Example:
        >>> source = resolve_model("smollm2")
        >>> loaded = load_pretrained(source, torch.float32, torch.device("cpu"))
        >>> loaded.tokenizer.decode(loaded.tokenizer.encode("Hello"))
        'Hello'
    """
    checkpoint = _open_directory(source) if source.kind == "directory" else _open_gguf(source)
    with _quiet():
        config = _build_config(checkpoint, source)
        module = _build_skeleton(config, dtype, checkpoint.weights, source)
        _fill(module, checkpoint.weights, dtype, device, on_progress)
        module.tie_weights()
        _rebuild_buffers(module, config, device)
        module.eval().requires_grad_(False)
        tokenizer = checkpoint.tokenizer(int(config.vocab_size))
    eos_token_ids = _eos_token_ids(checkpoint.generation, config)
    module.generation_config.eos_token_id = list(eos_token_ids) or None
    return Pretrained(
        module=module,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        max_position_embeddings=int(config.max_position_embeddings),
        source=source,
    )


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The weights' type: "auto" is float32 on a CPU and bfloat16 elsewhere.

    Raises:
        ModelError: Not "auto", "float32", "bfloat16", "float16" or one of those torch types.

    Example:
        >>> resolve_dtype("auto", torch.device("cpu"))
        torch.float32
    """
    if isinstance(name, torch.dtype) and name in _DTYPES.values():
        return name
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise ModelError("dtype", name, f"one of {['auto', *_DTYPES]}")


def _open_directory(source: ModelSource) -> _Checkpoint:
    from specround.models.tokenizer import tokenizer_from_directory

    directory = source.path
    config = read_json_object(directory / "config.json")
    _check_model_type(config, source)
    generation = directory / "generation_config.json"
    return _Checkpoint(
        config=config,
        generation=read_json_object(generation) if generation.is_file() else {},
        weights=SafetensorsWeights(directory),
        tokenizer=lambda vocab_size: tokenizer_from_directory(directory, vocab_size),
    )


def _open_gguf(source: ModelSource) -> _Checkpoint:
    from specround.models.gguf import GgufModel

    file = GgufModel(source.path)
    return _Checkpoint(
        config=file.config,
        generation={"eos_token_id": list(file.eos_token_ids)},
        weights=file,
        tokenizer=file.tokenizer,
    )


def _check_model_type(config: Mapping[str, Any], source: ModelSource) -> None:
    """Refuse what the native class would not compute as the checkpoint means it."""
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError("model_type", model_type, f"one of {list(SUPPORTED_MODEL_TYPES)} (model {source.name!r})")
    expected = _model_classes(model_type)[1].__name__
    architectures = config.get("architectures")
    if architectures and architectures != [expected]:
        raise ModelError("architectures", architectures, f"[{expected!r}] (model {source.name!r})")
    remote = config.get("auto_map")
    if isinstance(remote, dict) and "AutoModelForCausalLM" in remote:
        raise ModelError("auto_map", remote, "absent: code that comes with a checkpoint is never run")
    if config.get("quantization_config"):
        raise ModelError("quantization_config", config["quantization_config"], "absent: use unquantised safetensors")


def _model_classes(model_type: str) -> tuple[Any, Any]:
    """Configuration and module class of a supported model type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return {"llama": (LlamaConfig, LlamaForCausalLM)}[model_type]


def _build_config(checkpoint: _Checkpoint, source: ModelSource) -> Any:
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(checkpoint.weights.shapes):
        raise ModelError("num_hidden_layers", layers, f"at most the {len(checkpoint.weights.shapes)} stored tensors")
    config_class, _ = _model_classes(checkpoint.config["model_type"])
    try:
        config = config_class.from_dict(dict(checkpoint.config))
    except Exception as error:  # the configuration classes validate with errors of several libraries
        raise ModelError("config.json", type(error).__name__, f"valid for {source.name!r} ({error})") from error
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError("rope_type", rope_type, f"one of {list(SUPPORTED_ROPE_TYPES)} (model {source.name!r})")
    return config


def _build_skeleton(config: Any, dtype: torch.dtype, weights: WeightSource, source: ModelSource) -> Any:
    """The module on the meta device, once its parameters are known to be exactly the stored weights."""
    _, model_class = _model_classes(config.model_type)
    try:
        with torch.device("meta"):
            module = model_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
    except Exception as error:  # sizes that do not fit together fail deep inside torch or transformers
        raise ModelError("config.json", type(error).__name__, f"buildable for {source.name!r} ({error})") from error
    shared = _shared_names(module)
    wanted = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    stored = {name: shape for name, shape in weights.shapes.items() if not name.endswith(_IGNORED_SUFFIXES)}
    available = {shared.get(name, name) for name in stored}
    missing = [name for name in wanted if name not in available]
    if missing:
        raise ModelError("weights", missing, f"stored in the checkpoint of {source.name!r}: they are missing")
    unexpected = [name for name in stored if shared.get(name, name) not in wanted]
    if unexpected:
        raise ModelError("weights", unexpected, f"absent: a {config.model_type} model of this config does not use them")
    for name, shape in stored.items():
        expected = wanted[shared.get(name, name)]
        if shape != expected:
            raise ModelError(name, shape, f"{expected}, as the config says (in {weights.location(name)})")
    return module


def _shared_names(module: nn.Module) -> dict[str, str]:
    """Other name -> first name, for parameters that the config ties together."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _fill(
    module: nn.Module,
    weights: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None,
) -> None:
    shared = _shared_names(module)
    filled: dict[str, nn.Parameter] = {}
    total = len(weights.shapes)
    for done, (stored_name, tensor) in enumerate(weights.tensors(), start=1):
        name = shared.get(stored_name, stored_name)
        if name in filled:
            if not torch.equal(filled[name].cpu(), tensor.to(dtype)):
                tied = [name, *(other for other, first in shared.items() if first == name)]
                raise ModelError(" and ".join(tied), "different values", "equal: the config ties them")
        elif not name.endswith(_IGNORED_SUFFIXES):
            filled[name] = _own_parameter(name, tensor, dtype, device)
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, filled[name])
        if on_progress is not None:
            on_progress(done, total, stored_name)


def _own_parameter(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A copy in memory of our own: the tensor read may be a window of the mapped file."""
    try:
        own = torch.empty(tensor.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        size = tensor.numel() * dtype.itemsize
        raise ModelError(name, f"{size} bytes", f"a size that fits into the memory of {device} ({error})") from error
    return nn.Parameter(own.copy_(tensor), requires_grad=False)


def _rebuild_buffers(module: nn.Module, config: Any, device: torch.device) -> None:
    """Build the modules that compute their buffers from the config (rotary tables) again, off the meta device."""
    for name, child in list(module.named_modules()):
        if not any(buffer.is_meta for buffer in child.buffers(recurse=False)):
            continue
        owner, _, attribute = name.rpartition(".")
        fresh = type(child)(config)
        setattr(module.get_submodule(owner), attribute, fresh.to(device))
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise ModelError("weights", left, "filled from the checkpoint or from the config")


def _eos_token_ids(generation: Mapping[str, Any], config: Any) -> tuple[int, ...]:
    found = generation.get("eos_token_id", config.eos_token_id)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ModelError("eos_token_id", found, "a token id >= 0, a list of them, or null")
    return tuple(ids)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' log messages off the terminal while a model is built."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
