"""Load a checkpoint into a Hugging Face module: complete, exact, quiet, and without running anything it contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from specround.contract.errors import ModelError
from specround.models.families import FAMILIES, TEXT_PARTS, family_of
from specround.models.family import Family
from specround.models.placement import Placements, check_weights
from specround.models.recurrent.buffers import rebuild_state_buffers
from specround.models.rotary import check_rope, own_rotary
from specround.models.sources import ModelSource
from specround.models.weights import SafetensorsWeights, WeightSource, read_json_object

if TYPE_CHECKING:
    from specround.models.tokenizer import Tokenizer

SUPPORTED_MODEL_TYPES: Final = tuple(sorted(FAMILIES))

Progress = Callable[[int, int, str], None]
"""Called as (tensors done, tensors in all, name of the tensor just loaded)."""

_SPECIAL_FLOATS: Final = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}

UNLIMITED_LENGTH: Final = 2**17
"""Longest sequence of models without positions, which have no limit of their own."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A loaded model.

    Attributes:
        module: The Hugging Face causal language model, in eval mode, without gradients.
        config: Its configuration.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
        eos_token_ids: Ids that end a generation, in the checkpoint's order; empty when it names none.
        max_position_embeddings: The longest sequence, in tokens; `UNLIMITED_LENGTH` where the model names none.
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
    with quiet():
        family = family_of(checkpoint.config.get("model_type"), source.name)
        config = _build_config(checkpoint, family, source)
        module = _build_skeleton(config, family, dtype, source)
        family.check_module(module)
        names = _stored_tensors(module).keys()
        placements = Placements(family, config, _shared_names(module), checkpoint.weights.shapes, names)
        _fill(module, placements, checkpoint.weights, device, on_progress, source)
        module.tie_weights()
        _rebuild_buffers(module, config, family, device)
        module.eval().requires_grad_(False)
        tokenizer = checkpoint.tokenizer(int(config.vocab_size))
    eos_token_ids = _eos_token_ids(checkpoint.generation, config)
    module.generation_config.eos_token_id = list(eos_token_ids) or None
    return Pretrained(
        module=module,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or UNLIMITED_LENGTH),
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
    config = _text_config(read_json_object(directory / "config.json"), source)
    _check_model_type(config, source)
    generation = directory / "generation_config.json"
    return _Checkpoint(
        config=config,
        generation=read_json_object(generation) if generation.is_file() else {},
        weights=SafetensorsWeights(directory),
        tokenizer=lambda vocab_size: tokenizer_from_directory(directory, vocab_size),
    )


def _text_config(config: dict[str, Any], source: ModelSource) -> dict[str, Any]:
    """The configuration itself, or that of the text part of a model that also reads images."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return config
    section, whole = TEXT_PARTS[kind]
    text = config.get(section)
    if not isinstance(text, dict):
        raise ModelError(section, text, f"the configuration of the text part (model {source.name!r})")
    if config.get("architectures") != [whole]:
        raise ModelError("architectures", config.get("architectures"), f"[{whole!r}] (model {source.name!r})")
    family = family_of(text.get("model_type"), source.name)
    outer = {name: config[name] for name in ("auto_map", "quantization_config", "eos_token_id") if config.get(name)}
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return text | outer | {"architectures": [family.model_class], "tie_word_embeddings": tied}


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
    family = family_of(config.get("model_type"), source.name)
    architectures = config.get("architectures")
    if architectures and architectures != [family.model_class]:
        raise ModelError("architectures", architectures, f"[{family.model_class!r}] (model {source.name!r})")
    remote = config.get("auto_map")
    named = remote.get("AutoModelForCausalLM") if isinstance(remote, dict) else None
    if named is not None and named not in family.original_code:
        raise ModelError("auto_map", remote, "absent: code that comes with a checkpoint is never run")
    if config.get("quantization_config"):
        raise ModelError("quantization_config", config["quantization_config"], "absent: use unquantised safetensors")


def _build_config(checkpoint: _Checkpoint, family: Family, source: ModelSource) -> Any:
    import transformers

    if not hasattr(transformers, family.config_class):
        known = f"known to transformers {transformers.__version__}, which has no {family.config_class}: it is too old"
        raise ModelError("model_type", checkpoint.config["model_type"], f"{known} (model {source.name!r})")
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(checkpoint.weights.shapes):
        raise ModelError("num_hidden_layers", layers, f"at most the {len(checkpoint.weights.shapes)} stored tensors")
    try:
        values = {key: _decoded(value) for key, value in checkpoint.config.items() if key != "auto_map"}
        config = getattr(transformers, family.config_class).from_dict(values)
    except Exception as error:  # the configuration classes validate with errors of several libraries
        raise ModelError("config.json", type(error).__name__, f"valid for {source.name!r} ({error})") from error
    check_rope(family, config, source.name)
    family.check(config)
    if family.experts is not None:
        config.output_router_logits = False
    return config


def _decoded(value: Any) -> Any:
    """A JSON value in which transformers' objects for the floats that JSON lacks are floats."""
    if isinstance(value, dict):
        special = _SPECIAL_FLOATS.get(str(value.get("__float__"))) if len(value) == 1 else None
        return {key: _decoded(part) for key, part in value.items()} if special is None else special
    return [_decoded(part) for part in value] if isinstance(value, list) else value


def _build_skeleton(config: Any, family: Family, dtype: torch.dtype, source: ModelSource) -> Any:
    """The module on the meta device; experts run as grouped matrix products."""
    import transformers

    model_class = getattr(transformers, family.model_class)
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    try:
        with torch.device("meta"):
            module = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
        if family.experts is not None:
            module.set_experts_implementation("grouped_mm")
    except Exception as error:  # sizes that do not fit together fail deep inside torch or transformers
        raise ModelError("config.json", type(error).__name__, f"buildable for {source.name!r} ({error})") from error
    return module


def _shared_names(module: nn.Module) -> dict[str, str]:
    """Other name -> first name, for parameters that the config ties together."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint must hold, by first name: parameters and the buffers that are not computed."""
    kept = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
    return dict(module.named_parameters()) | buffers


def _fill(
    module: Any,
    placements: Placements,
    weights: WeightSource,
    device: torch.device,
    on_progress: Progress | None,
    source: ModelSource,
) -> None:
    """Read every weight into the module, once it is known that they are exactly the module's."""
    wanted = _stored_tensors(module)
    check_weights(wanted, weights.shapes, placements, source.name, module.config.model_type)
    for stored, shape in weights.shapes.items():
        place = placements.of(stored)
        expected = None if place is None else tuple(place.part(wanted[place.name]).shape)
        if expected is not None and shape != expected:
            raise ModelError(stored, shape, f"{expected}, as the config says (in {weights.location(stored)})")
    filled: dict[str, torch.Tensor] = {}
    done_places: dict[object, str] = {}
    total = len(weights.shapes)
    for done, (stored, tensor) in enumerate(weights.tensors(), start=1):
        place = placements.of(stored)
        if place is not None and place in done_places:
            if not torch.equal(place.part(filled[place.name]).cpu(), tensor.to(filled[place.name].dtype)):
                names = sorted((done_places[place], stored), key=lambda name: name != place.name)
                raise ModelError(" and ".join(names), "different values", "equal: the config ties them")
        elif place is not None:
            if place.name not in filled:
                kept = _dtype_of(place.name, module, wanted[place.name].dtype)
                filled[place.name] = _own_tensor(place.name, wanted[place.name], kept, device)
                _set_tensor(module, place.name, filled[place.name])
            place.part(filled[place.name]).copy_(tensor)
            done_places[place] = stored
        if on_progress is not None:
            on_progress(done, total, stored)


def _dtype_of(name: str, module: Any, dtype: torch.dtype) -> torch.dtype:
    """The type of one tensor: some stay float32, such as the biases that correct a router's scores.

    Args:
        name: The module's tensor.
        module: The model.
        dtype: What its module made it in, which is the model's type or one of its own.
    """
    kept = set(module._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    return torch.float32 if any(pattern in name for pattern in kept) else dtype


def _own_tensor(name: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of our own: a tensor that was read may be a window of the mapped file."""
    try:
        return torch.empty(like.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        size = like.numel() * dtype.itemsize
        raise ModelError(name, f"{size} bytes", f"a size that fits into the memory of {device} ({error})") from error


def _set_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    is_buffer = attribute in owner._buffers
    setattr(owner, attribute, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))


def _rebuild_buffers(module: Any, config: Any, family: Family, device: torch.device) -> None:
    """Compute the buffers that come from the config, off the meta device: rotary tables and embedding scales."""
    rotary = own_rotary(family, config)
    if rotary is not None:
        module.base_model.rotary_emb = rotary.to(device)
    for name, child in list(module.named_modules()):
        if not any(buffer.is_meta for buffer in child.buffers(recurse=False)):
            continue
        if hasattr(child, "scalar_embed_scale"):
            child.embed_scale = torch.tensor(child.scalar_embed_scale, dtype=child.weight.dtype, device=device)
            continue
        if rebuild_state_buffers(child, config, device):
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
def quiet() -> Iterator[None]:
    """Keep transformers' log messages and bars off the terminal while a model is built or written."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
