"""Run one engine on some requests and print what it generated: `python one_engine.py JOB.json RESULT.json`.

A process of its own for each engine, because vLLM keeps global state.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/vllm"), str(ROOT / "tests"), str(ROOT / "examples")]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def run_vllm(job):
    from specround.integrations.vllm import llm_kwargs, prepare_environment

    prepare_environment()
    import file_speculators  # noqa: F401  (registers)
    import tree_speculator  # noqa: F401  (registers "recall")

    from vllm import LLM, SamplingParams

    settings = {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "block_size": 32,
        "enable_prefix_caching": False,
        **job.get("engine", {}),
    }
    if job.get("speculative"):
        settings = llm_kwargs(job["speculative"], **settings)
    seen = watch(job.get("broken"))
    llm = LLM(**settings)
    outputs = []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ask["prompt"]} for ask in batch]
        params = [
            SamplingParams(ignore_eos=True, detokenize=False, **{k: v for k, v in ask.items() if k != "prompt"})
            for ask in batch
        ]
        made = llm.generate(prompts, params, use_tqdm=False)
        outputs.append([list(one.outputs[0].token_ids) for one in made])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    seen["leaked_blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return {"tokens": outputs, **seen}


def watch(broken):
    """Record every round of the host, and break it where a negative control asks for it."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from specround.integrations.vllm import step as host

    prompts: dict[str, tuple[int, ...]] = {}
    seen = {"rounds": defaultdict(list), "moves": 0, "preemptions": 0, "most_running": 0, "rows": [], "hits": 0}
    steps, preempt = host.RoundSteps, Scheduler._preempt_request
    start, plan, commit = steps.start, steps.plan, steps.commit

    def watched_start(self, request_id, req_idx, token_ids, limit):
        prompts.setdefault(request_id, tuple(token_ids))
        start(self, request_id, req_idx, token_ids, limit)

    def watched_plan(self, requests, *rest):
        step = plan(self, requests, *rest)
        if broken == "mask" and step.layout.rows.groups:
            for group in step.layout.rows.groups:
                group.visible.copy_(group.distance >= 0)
        seen["most_running"] = max(seen["most_running"], len(requests.request_ids))
        seen["rows"].append(max(requests.num_plan_rows))
        return step

    def watched_commit(self, caches, hidden_states):
        commit(self, [] if broken == "commit" else caches, hidden_states)
        result = self.current.result
        for i, request_id in enumerate(self.current.requests.request_ids):
            count = int(result.num_committed[i])
            path = result.path[i, :count].tolist()
            seen["moves"] += path != list(range(count))
            if count:
                seen["rounds"][str(list(prompts[request_id]))].append(result.token_ids[i, :count].tolist())

    def watched_preempt(self, *arguments, **named):
        seen["preemptions"] += 1
        return preempt(self, *arguments, **named)

    def watched_add(self, scheduler_output):
        seen["hits"] += sum(new.num_computed_tokens > 0 for new in scheduler_output.scheduled_new_reqs)
        add(self, scheduler_output)

    add, GPUModelRunner.add_requests = GPUModelRunner.add_requests, watched_add
    steps.start, steps.plan, steps.commit = watched_start, watched_plan, watched_commit
    Scheduler._preempt_request = watched_preempt
    return seen


def run_embedded(job):
    import file_speculators  # noqa: F401
    import tree_speculator  # noqa: F401

    from specround import LLM, SamplingParams

    llm = LLM(
        job["model"], job.get("speculative"), device="cpu", dtype="float32", record_rounds=True, **job.get("engine", {})
    )
    tokens, rounds = [], {}
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ask["prompt"]} for ask in batch]
        params = [
            SamplingParams(ignore_eos=True, detokenize=False, **{k: v for k, v in ask.items() if k != "prompt"})
            for ask in batch
        ]
        made = llm.generate(prompts, params)
        tokens.append([list(one.outputs[0].token_ids) for one in made])
        for ask, one in zip(batch, made, strict=True):
            rounds[str(ask["prompt"])] = [list(trace.committed) for trace in one.rounds]
    return {"tokens": tokens, "rounds": rounds}


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    result = run_embedded(job) if job.get("host") == "embedded" else run_vllm(job)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
