"""Run engines on some requests, each in a process of its own because vLLM keeps global state.

`python one_engine.py` reads one line per job, a JSON list of three paths: the job, its result, its log. It imports vLLM
once, forks for each job, and answers with the exit status. `vllm_targets.Engines` is its other end.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import sys
import traceback
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/vllm"), str(ROOT / "tests"), str(ROOT / "examples")]
MOST_SECONDS = 500


def run_vllm(job):
    import file_speculators  # noqa: F401  (registers)
    import tree_speculator  # noqa: F401  (registers "recall")

    from specround.integrations.vllm import llm_kwargs
    from vllm import LLM

    settings = {
        "model": job["model"],
        "skip_tokenizer_init": not job.get("with_tokenizer"),
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "block_size": 32,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 48,
        **job.get("engine", {}),
    }
    if job.get("speculative"):
        settings = llm_kwargs(job["speculative"], **settings)
    rewired = dict(job.get("rewired", {}))
    if "num_speculative_tokens" in rewired:
        settings["speculative_config"]["num_speculative_tokens"] = rewired.pop("num_speculative_tokens")
    settings |= rewired
    seen = watch(job.get("broken"))
    llm = LLM(**settings)
    outputs, logprobs = [], []
    for batch in job["batches"]:
        made = generate(llm.llm_engine, batch, job.get("aborts", {}))
        outputs.append([list(one.outputs[0].token_ids) for one in made])
        logprobs.append([list(pairs(one)) for one in made])
    if "sessions" in job:
        outputs.append(generate_sessions(llm.llm_engine, job["sessions"]))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    seen["leaked_blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return {"tokens": outputs, "logprobs": logprobs, **seen}


def generate(engine, batch, aborts):
    """What each request generated; `aborts` names the step after which a request is aborted."""
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from vllm import SamplingParams

    for place, ask in enumerate(batch):
        settings = {name: value for name, value in ask.items() if name != "prompt"}
        if "structured_outputs" in settings:
            settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
        if "logit_bias" in settings:  # JSON has no integer keys
            settings["logit_bias"] = {int(token): value for token, value in settings["logit_bias"].items()}
        params = SamplingParams(ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE, **settings)
        engine.add_request(str(place), {"prompt_token_ids": ask["prompt"]}, params)
    made = {}
    for step in itertools.count(1):
        made |= {output.request_id: output for output in engine.step()}
        engine.abort_request([place for place, last in aborts.items() if last == step])
        if not engine.has_unfinished_requests():
            return [made[str(place)] for place in range(len(batch))]


def generate_sessions(engine, sessions):
    """What requests generated whose input comes in chunks: one update for each, and an empty one at the end."""
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    made, tasks = [[] for _ in sessions], engine.get_supported_tasks()
    for place, chunks in enumerate(sessions):
        request_id = str(place)
        for number, chunk in enumerate([*chunks, {"prompt": [0], "max_tokens": 1}]):
            settings = {name: value for name, value in chunk.items() if name != "prompt"}
            params = SamplingParams(
                ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, temperature=0.0, **settings
            )
            prompt = {"prompt_token_ids": chunk["prompt"]}
            goes_on = number < len(chunks)
            update = engine.input_processor.process_inputs(request_id, prompt, params, tasks, resumable=goes_on)
            if number == 0:
                engine.input_processor.assign_request_id(update)
                request_id = update.request_id
            else:
                update.external_req_id = str(place)
            engine.output_processor.add_request(update, None, None, 0)
            engine.engine_core.add_request(copy.deepcopy(update))
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[int(output.request_id)] += output.outputs[0].token_ids
    return made


def pairs(output):
    """Token and logprob of every prompt and output position, best first."""
    for position in [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]:
        yield from sorted((token, entry.logprob) for token, entry in (position or {}).items())


def watch(broken):
    """Record every round of the host, and break it where a negative control asks for it."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

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
        bits = step.layout.rows.context.bits
        if broken == "mask" and bits is not None:
            bits.fill_(-1)
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

    if broken == "chunks":
        rejection_sampler.MAX_CHUNK_BYTES = 1
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


def preload():
    """Import vLLM before the first fork. Its import starts no thread, so forking afterwards is safe."""
    from specround.integrations.vllm import runner, scheduler, worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "importing vLLM started threads"


def run_job(job_file, result_file, log_file):
    """In the forked process: run, write the result, end."""
    signal.alarm(MOST_SECONDS)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        job = json.loads(Path(job_file).read_text())
        os.environ |= job.get("environment", {})
        result = run_embedded(job) if job.get("host") == "embedded" else run_vllm(job)
        Path(result_file).write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main():
    preload()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run_job(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ in ("__main__", "__mp_main__"):  # processes that vLLM spawns import this module before vLLM
    from specround.integrations.vllm import prepare_environment

    prepare_environment()
if __name__ == "__main__":
    main()
