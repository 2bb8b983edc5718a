"""vLLM in this process: a run, its memory, and what it leaves alone."""

import random

import numpy as np
import psutil
import pytest
import torch
import yaml

from real_vllm import check_scores, make, make_policy, perturb_adapters, requests
from rlalign.cli import main
from rlalign.rollouts.sampling.base import SamplingParams
from rlalign.rollouts.sampling.vllm import VLLMSampler
from runs import make_run


def test_the_process_is_left_as_it_was(samplers, models):
    policy, sampler = make_policy(models["llama"]), samplers("engine", "llama")
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    threads = torch.get_num_threads()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sampler.sync(policy)
    sampler.sample(requests(sampler, 2), SamplingParams(4))
    sampler.release()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_the_cache_is_given_back_while_the_policy_learns(models):
    policy, sampler = make_policy(models["llama"]), make(VLLMSampler, models["llama"], cache_gb=0.5)
    sampler.sync(policy)
    sampler.sample(requests(sampler, 1), SamplingParams(4))
    before = psutil.Process().memory_info().rss
    sampler.release()
    freed = before - psutil.Process().memory_info().rss
    assert freed > 0.4 * 2**30
    sampler.sync(policy)
    assert psutil.Process().memory_info().rss > before - 0.1 * 2**30


def test_a_copy_in_bfloat16_says_what_it_drew_from(models):
    sampler = make(VLLMSampler, models["llama"], dtype="bfloat16")
    policy = make_policy(models["llama"], lora_rank=4)
    sampler.sync(policy)
    asked, params = requests(sampler, 4), SamplingParams(12)
    drawn = sampler.sample(asked, params)
    with pytest.raises(AssertionError):
        check_scores(policy, asked, drawn, params)  # of the policy in float32
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.data = parameter.data.bfloat16().float()
    perturb_adapters(policy, 0)
    assert sampler.is_approximate(torch.float32)
    assert sampler.is_approximate(torch.bfloat16)
    assert VLLMSampler().is_approximate(torch.bfloat16)
    assert not VLLMSampler().is_approximate(torch.float32)


def test_unknown_arguments_of_the_engine_are_told(models):
    sampler = make(VLLMSampler, models["llama"], engine={"max_model_length": 64})
    with pytest.raises(ValueError, match="'max_model_length': did you mean 'max_model_len'"):
        sampler.sync(make_policy(models["llama"]))


@pytest.mark.parametrize("policy", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_a_run_learns_from_what_vllm_drew(models, tmp_path, policy):
    """The policy scores its tokens as vLLM did, iteration after iteration; with old weights there it would not."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}+{i % 3}=", "answer": "{i}"}}\n' for i in range(12)))
    sampler = make(VLLMSampler, models["llama"])
    module, data, trainer = make_run(
        models["llama"], str(prompts), sampler=sampler, policy=policy, importance_cap=2.0, trainer={"max_epochs": 3}
    )
    apart, moved = [], []
    step = module.training_step

    def watched(batch, batch_idx):
        mask = batch.loss_mask
        own = module.score(batch)[0].detach()
        apart.append(float((own - batch.sampler_logprobs)[mask].abs().max()))
        moved.append(own[mask][:4].tolist())
        return step(batch, batch_idx)

    module.training_step = watched
    trainer.fit(module, data)
    assert len(apart) == 3
    assert max(apart) < 1e-3
    assert moved[0] != moved[1] != moved[2]


def test_a_run_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    root = __file__.partition("tests")[0]
    files = [f"--config={root}configs/{name}.yaml" for name in ("base", "tiny/grpo", "samplers/vllm")]
    small = ["max_epochs=1", "check_val_every_n_epoch=1"]
    short = ["prompts_per_iteration=4", "step_size=null", "val_limit=8", "sampler.init_args.cache_gb=0.1"]
    options = [f"--trainer.{o}" for o in small] + [f"--data.init_args.{o}" for o in short]
    assert main(["fit", *files, "--run=short", *options]) == 0
    config = yaml.safe_load((tmp_path / "runs/short/config.yaml").read_text())
    assert config["data"]["init_args"]["sampler"]["class_path"].endswith("VLLMSampler")
