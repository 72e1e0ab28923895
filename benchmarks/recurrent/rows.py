"""Cost of verifying rows, and of prefill, on hybrid models of 30 to 60 million random parameters.

    python benchmarks/recurrent/rows.py [--threads 2] [--repeats 5] [--prompt-tokens 1024]

The gate comes first: in both state modes `suffix_tree` must generate what plain decoding generates. Then forwards of
1 to 64 rows of one request are timed in both modes, and a prompt's prefill beside transformers' own forward of the same
module, in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from specround import LLM, SamplingParams
from specround.bench.hardware import describe_hardware, describe_versions
from specround.bench.row_curve import measure_row_curve

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5-like": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "bamba-like": (
        "BambaConfig",
        "BambaForCausalLM",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "attn_layer_indices": [3, 7],
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_expand": 2,
        },
    ),
}
COMMON = {"vocab_size": 16384, "max_position_embeddings": 4096, "tie_word_embeddings": True, "eos_token_id": 2}
MODES = ("replay", "slots")


def write_model(directory: Path, shape: str) -> tuple[str, Any]:
    """A random checkpoint and the module it was written from."""
    config_class, model_class, settings = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**COMMON, **settings)
    module = getattr(transformers, model_class)(config).eval()
    module.save_pretrained(directory)
    return str(directory), module


def check(path: str) -> int:
    """Speculation in both modes against plain decoding; the number of tokens compared."""
    prompts = [{"prompt_token_ids": [(7 * i * i + k) % 300 for i in range(40)] * 2} for k in range(4)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def texts(speculation: dict[str, Any] | None, mode: str) -> list[list[int]]:
        llm = LLM(path, speculation, max_model_len=256, state_mode=mode)
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    plain = texts(None, "replay")
    for mode in MODES:
        found = texts(
            {"method": "suffix_tree", "num_speculative_tokens": 12, "suffix_decoding_max_spec_factor": 4.0}, mode
        )
        if found != plain:
            sys.exit(f"{path}, state_mode={mode}: speculation changes the text; nothing was timed")
    return sum(map(len, plain))


def row_costs(path: str, mode: str, repeats: int) -> list[dict[str, float]]:
    """Milliseconds and cost over one row, by rows."""
    llm = LLM(
        path,
        {"method": "specround.bench.row_curve:RowCurveConfig"},
        max_model_len=2048,
        max_num_seqs=1,
        state_mode=mode,
        check_values=False,
    )
    rows: list[dict[str, float]] = measure_row_curve(llm, repeats)["rows"]
    return rows


@torch.no_grad()
def prefill_rates(path: str, module: Any, tokens: int, repeats: int) -> dict[str, float]:
    """Prompt tokens per second of the engine and of transformers, in turn."""
    llm = LLM(path, max_model_len=4096, max_num_seqs=1, max_num_batched_tokens=tokens)
    prompt = [(31 * i) % COMMON["vocab_size"] for i in range(tokens)]  # type: ignore[operator]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times: dict[str, list[float]] = {"specround": [], "transformers": []}
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, one)
        middle = time.perf_counter()
        module(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        if repeat:
            times["specround"].append(middle - started)
            times["transformers"].append(time.perf_counter() - middle)
    return {name: tokens / statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            path, module = write_model(Path(directory), shape)
            compared = check(path)
            print(f"{shape}: {compared} tokens equal in both modes", file=sys.stderr, flush=True)
            curves = {mode: row_costs(path, mode, arguments.repeats) for mode in MODES}
            rates = prefill_rates(path, module, arguments.prompt_tokens, arguments.repeats)
            found[shape] = {
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "tokens_compared": compared,
                "rows": curves,
                "prefill_tokens_per_s": rates,
                "prefill_over_transformers": rates["specround"] / rates["transformers"],
            }
    hardware = describe_hardware(torch.device("cpu"))
    print(json.dumps({"benchmark": "recurrent rows", "hardware": hardware, "versions": describe_versions(), **found}))


if __name__ == "__main__":
    main()
