"""The server that is started here: when it ends, and that it starts again."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from real_vllm import check_scores, make, make_policy, requests
from rlalign.rollouts.sampling.base import SamplingParams
from rlalign.rollouts.sampling.vllm import VLLMServerSampler

START = """
import sys, time
sys.path[:0] = {paths!r}
from real_vllm import make, make_policy
from rlalign.rollouts.sampling.vllm import VLLMServerSampler
if __name__ == "__main__":
    sampler = make(VLLMServerSampler, {model!r})
    sampler.sync(make_policy({model!r}))
    print("pid", sampler.server.process.pid, flush=True)
    time.sleep(600)
"""


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_a_dead_server_starts_again_and_ends_with_the_sampler(models):
    policy, sampler = make_policy(models["llama"], lora_rank=4), make(VLLMServerSampler, models["llama"])
    sampler.sync(policy)
    first = sampler.server
    children = psutil.Process(first.process.pid).children(recursive=True)
    assert len(children) > 1
    for child in children:
        child.kill()
    first.process.wait()
    assert gone(children)
    with pytest.raises(ConnectionError, match="does not answer"):
        sampler.sample(requests(sampler, 1), SamplingParams(4))
    sampler.sync(policy)
    assert sampler.server is not first
    assert not first.folder.exists()
    asked = requests(sampler, 2)
    check_scores(policy, asked, sampler.sample(asked, SamplingParams(8)), SamplingParams(8))
    second = sampler.server
    assert oct(second.folder.stat().st_mode & 0o777) == "0o700"
    children = psutil.Process(second.process.pid).children(recursive=True)
    del sampler
    assert gone(children)
    assert not second.folder.exists()


def test_a_server_ends_when_its_owner_is_killed(models):
    code = START.format(paths=[path for path in sys.path if path], model=models["llama"])
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    line = next(line for line in owner.stdout if line.startswith("pid"))
    guard = psutil.Process(int(line.split()[1]))
    family = [guard, *guard.children(recursive=True)]
    assert len(family) > 2
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    began = time.monotonic()
    assert gone(family)
    assert time.monotonic() - began < 30
