"""`specround vllm serve` starts vLLM's own server, with its engine in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from vllm_targets import ENGINES, QUIET

from tiny_models import tiny_llama

pytestmark = pytest.mark.vllm
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


def ask(port: int, path: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def test_serve(tmp_path):
    """A completion over HTTP has the tokens that plain vLLM generates, and drafts were accepted on the way."""
    model = tiny_llama(tmp_path / "model", seed=4, hidden=128, with_tokenizer=True)
    asked = [{"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}]
    plain = ENGINES.run(tmp_path, "plain", {"model": str(model), "batches": [asked], "engine": {"max_model_len": 128}})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4, "max_branching": 2}
    command = [str(Path(sys.executable).with_name("specround")), "vllm", "serve", str(model)]
    command += ["--speculative-config", json.dumps(config), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "128", "--dtype", "float32", "--block-size", "32", "--max-num-seqs", "2"]
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=os.environ | QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            cwd=tmp_path,
        )
        try:
            for _ in range(120):
                assert server.poll() is None, log.read_text()[-4000:]
                try:
                    ask(port, "/health")
                    break
                except OSError:
                    time.sleep(1)
            body = {"model": str(model), "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = json.loads(ask(port, "/v1/completions", body | {"return_token_ids": True}))
            metrics = ask(port, "/metrics").decode()
        finally:
            server.terminate()
            server.wait(60)
    assert answer["choices"][0]["token_ids"] == plain["tokens"][0][0]
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(accepted[0].split()[-1]) > 5
