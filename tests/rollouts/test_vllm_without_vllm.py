"""What can be said of sampling by vLLM where there is none; ``make test-vllm`` has the rest."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rlalign.models.merged import merged_weights
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import Completion, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.vllm import VLLMServerSampler
from rlalign.rollouts.sampling.vllm import guard as guard_module
from rlalign.rollouts.sampling.vllm.fields import completion, sampling_fields, seed_of

REQUESTS = [SampleRequest((7, 8, 9), 0, 0, 3), SampleRequest((7, 8, 9), 0, 1, 3), SampleRequest((5,), 1, 0, 3)]
FACTS = {"logprobs_mode": "raw_logprobs", "can_sleep": False, "keeps_packed_weights": False}


class FakeServer(ThreadingHTTPServer):
    """Speaks as vLLM's server does, and remembers what it was told."""

    def __init__(self, facts: dict) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.facts, self.told, self.weights, self.bodies = facts, [], {}, []
        self.parts = b""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": "policy", "max_model_len": 64}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path == "/collective_rpc":
            self.reply({"results": [self.rpc(body["method"], *body["args"])]})
        elif self.path == "/v1/completions":
            self.server.bodies.append((body, self.headers["Authorization"]))
            ids = [11, body["seed"] % 7 + 20, 1]
            chosen = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, -1.0, -0.25]}}
            self.reply({"choices": [chosen]})
        else:
            self.server.told.append(self.path)
            self.reply({"success": True})

    def rpc(self, method, *args):
        server = self.server
        if method == "rlalign_facts":
            return server.facts
        if method == "rlalign_receive":
            name, dtype, shape, data, is_last = args
            server.parts += base64.b64decode(data)
            if is_last == "1":
                sizes = [int(size) for size in shape.split(",")]
                flat = torch.frombuffer(bytearray(server.parts), dtype=getattr(torch, dtype))
                server.weights[name], server.parts = flat.view(sizes), b""
            return None
        server.told.append((method, *args))
        return None

    def reply(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def serve():
    servers = []

    def start(**facts) -> FakeServer:
        servers.append(FakeServer(FACTS | facts))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def sampler_of(server: FakeServer, path: str, **options) -> VLLMServerSampler:
    sampler = VLLMServerSampler(url=f"http://127.0.0.1:{server.server_address[1]}", **options)
    sampler.setup(AutoTokenizer.from_pretrained(path))
    return sampler


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_gets_merged_weights_and_answers_in_order(serve, tiny_model, monkeypatch, dtype):
    monkeypatch.setattr("rlalign.rollouts.sampling.vllm.connection._PIECE", 1000)  # some weights come in pieces
    monkeypatch.setenv("A_KEY", "secret")
    server = serve()
    sampler = sampler_of(server, tiny_model, dtype=dtype, api_key_env="A_KEY")
    policy = Policy(PolicyConfig(tiny_model, lora_rank=2))
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    sampler.sync(policy)
    want = {name: weight.to(getattr(torch, dtype)) for name, weight in merged_weights(policy.model)}
    assert server.weights.keys() == want.keys()
    assert all(torch.equal(server.weights[name], weight) for name, weight in want.items())
    drawn = sampler.sample(REQUESTS, SamplingParams(4, temperature=0.5, top_k=3, stop=["ab"]))
    assert server.told == [
        ("rlalign_begin",),
        ("rlalign_finish",),
        "/reset_prefix_cache",
        ("rlalign_temper", 0.5),
    ]
    ids = [[11, seed_of(request) % 7 + 20, 1] for request in REQUESTS]
    assert drawn == [Completion(row, [-0.5, -1.0, -0.25], "eos") for row in ids]
    assert {key for _, key in server.bodies} == {"Bearer secret"}
    asked = {(tuple(body["prompt"]), body["seed"]) for body, _ in server.bodies}
    assert asked == {(request.prompt_ids, seed_of(request)) for request in REQUESTS}
    for body, _ in server.bodies:
        assert body["return_token_ids"] is True
        assert (body["temperature"], body["top_k"], body["stop"], body["stop_token_ids"]) == (1.0, 3, ["ab"], [1])
    sampler.release()
    sampler.release()
    sampler.sync(policy)
    assert server.told[4:6] == [("rlalign_drop_cache",), ("rlalign_restore_cache",)]


def test_a_server_with_a_gpu_sleeps_meanwhile(serve, tiny_model):
    server = serve(can_sleep=True)
    sampler, policy = sampler_of(server, tiny_model), Policy(PolicyConfig(tiny_model))
    sampler.sync(policy)
    sampler.release()
    with pytest.raises(RuntimeError, match="sync"):
        sampler.sample(REQUESTS, SamplingParams(4))
    sampler.sync(policy)
    reset = "/reset_prefix_cache"
    load = [("rlalign_begin",), ("rlalign_finish",), reset]
    assert server.told == [*load, "/sleep?level=2", "/wake_up", *load]


@pytest.mark.parametrize(
    ("facts", "said"),
    [({"logprobs_mode": "processed_logprobs"}, "raw_logprobs"), ({"keeps_packed_weights": True}, "enforce-eager")],
)
def test_a_server_that_would_give_wrong_numbers_is_refused(serve, tiny_model, facts, said):
    sampler = sampler_of(serve(**facts), tiny_model)
    with pytest.raises(RuntimeError, match=said):
        sampler.sync(Policy(PolicyConfig(tiny_model)))


def test_a_server_that_is_not_there_is_told(tiny_model):
    sampler = VLLMServerSampler(url="http://127.0.0.1:9")
    sampler.setup(AutoTokenizer.from_pretrained(tiny_model))
    with pytest.raises(ConnectionError, match="does not answer"):
        sampler.sync(Policy(PolicyConfig(tiny_model)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "must begin with http"),
        ({"url": "http://a", "engine": {"x": 1}}, "started here"),
        ({"python": sys.executable, "api_key_env": "KEY"}, "give url"),
        ({"url": "http://a", "api_key_env": "NOT_THERE"}, "no such environment variable"),
        ({"python": sys.executable, "max_rows": 0}, "max_rows"),
        ({"python": sys.executable, "cache_gb": 0}, "cache_gb"),
        ({"python": sys.executable, "engine": {"logprobs_mode": "processed_logprobs"}}, "sets itself"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        VLLMServerSampler(**options)


def test_a_server_that_ends_at_its_start_says_why(tiny_model):
    sampler = VLLMServerSampler(python=sys.executable)  # which has no vLLM
    sampler.setup(AutoTokenizer.from_pretrained(tiny_model))
    with pytest.raises(RuntimeError, match="No module named 'vllm'"):
        sampler.sync(Policy(PolicyConfig(tiny_model)))
    sampler = VLLMServerSampler(python="no/such/python")
    sampler.setup(AutoTokenizer.from_pretrained(tiny_model))
    with pytest.raises(FileNotFoundError, match="no/such/python"):
        sampler.sync(Policy(PolicyConfig(tiny_model)))


def test_a_seed_is_a_function_of_the_three_numbers():
    seeds = {seed_of(SampleRequest((1,), p, s, seed)) for p in range(4) for s in range(4) for seed in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(SampleRequest((1,), 2, 3, 4)) == seed_of(SampleRequest((9, 9), 2, 3, 4))


def test_everything_is_said_and_nothing_inherited_kf51(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    params = SamplingParams(9, temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, stop=["x", "<unk>"])
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    assert sampling_fields(REQUESTS[0], params, [1, 5], tokenizer) == {
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": seed_of(REQUESTS[0]),
        "stop": ["x", "<unk>"],
        "stop_token_ids": [1, 2, 5],
        "ignore_eos": True,
        "logprobs": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    assert sampling_fields(REQUESTS[0], SamplingParams(temperature=0), [1], tokenizer)["temperature"] == 0.0


def test_reasons_are_ours():
    assert completion([4, 1], [-1.0, -2.0], "stop", [1]) == Completion([4, 1], [-1.0, -2.0], "eos")
    assert completion([4, 1], [-1.0, -2.0], "length", [1]).finish_reason == "eos"
    assert completion([4, 3], [-1.0, -2.0], "stop", [1]).finish_reason == "stop"
    assert completion([4, 3], [-1.0, -2.0], "length", [1]).finish_reason == "length"
    for bad in (float("nan"), float("-inf"), -9999.0, None):
        with pytest.raises(FloatingPointError):
            completion([4, 3], [-1.0, bad], "length", [1])
    for ids, reason in (([4, 3], "abort"), ([4], "length"), ([], "stop")):
        with pytest.raises(RuntimeError, match="log-probabilities"):
            completion(ids, [-1.0, -2.0], reason, [1])


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_server_ends_with_those_who_started_it(tmp_path, how):
    """With its own children, and even where it does not listen to SIGTERM."""
    notes = tmp_path / "pids"
    stubborn = f"trap '' TERM; sleep 100 & echo $$ $! > {notes}.new; mv {notes}.new {notes}; wait; wait; sleep 100"
    code = f"""
import runpy, sys
sys.argv = ["guard", "sh", "-c", {stubborn!r}]
guard = runpy.run_path({guard_module.__file__!r})
guard["end"].__globals__["GRACE_SECONDS"] = 0.3
guard["main"]()
"""
    guard = [sys.executable, "-c", code]
    if how == "closed":
        process = subprocess.Popen(guard, stdin=subprocess.PIPE)
    else:
        owner = f"import subprocess\nsubprocess.Popen({guard!r}, stdin=subprocess.PIPE).wait()"
        process = subprocess.Popen([sys.executable, "-c", owner])
    until = time.monotonic() + 30
    while not notes.exists() and time.monotonic() < until:
        time.sleep(0.02)
    pids = list(map(int, notes.read_text().split()))
    assert all(map(is_alive, pids))
    if how == "closed":
        process.stdin.close()
    else:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
