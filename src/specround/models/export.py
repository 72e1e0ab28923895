"""`export_model`: write a model that was loaded from anywhere as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch

from specround.contract import ModelError
from specround.models.pretrained import Progress, load_pretrained, quiet, resolve_dtype
from specround.models.sources import resolve_model


def export_model(model: str, directory: Path, dtype: str = "auto", on_progress: Progress | None = None) -> None:
    """Write safetensors, configuration, tokenizer and chat template, for other engines to load.

    Args:
        model: A directory, a GGUF file, a hub id or an alias.
        directory: Where to; made if it is not there, and must be empty.
        dtype: Type of the weights; "auto" = float32, in which nothing of a checkpoint is lost.
        on_progress: Called after each tensor that is read.

    Raises:
        ModelError: The model cannot be loaded, or the directory is not empty.

    Example:
        >>> export_model("smollm2", Path("my-model"))  # doctest: +SKIP
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError("DIRECTORY", str(directory), "a directory that is empty or not there yet")
    device = torch.device("cpu")
    loaded = load_pretrained(resolve_model(model), resolve_dtype(dtype, device), device, on_progress=on_progress)
    ends = list(loaded.eos_token_ids)
    for settings in (loaded.module.config, loaded.module.generation_config):
        settings.eos_token_id = ends or None
    with quiet():
        loaded.module.save_pretrained(directory)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(directory)
