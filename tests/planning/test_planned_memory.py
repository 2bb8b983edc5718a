"""The planner's counts, against models that are really made and what autograd really keeps."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from test_method_pages import METHODS as CLASSES
from transformers import AutoModelForCausalLM

import rlalign.cli.classes  # noqa: F401  (all methods)
from rlalign.assets import EMBEDDED_MODEL
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.planning.memory import NF4, Setting, Sharding, Workload, estimate, kept_activations
from rlalign.planning.methods import METHODS
from rlalign.planning.shapes import KNOWN, shape_of

EMBEDDED = shape_of("embedded")
WORK = Workload(rows=4, prompt=16, response=24, group=2)


def test_the_shape_is_that_of_the_model():
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL)
    assert EMBEDDED.parameters == sum(p.numel() for p in model.parameters())
    layers = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert EMBEDDED.projections == sum(m.weight.numel() for m in layers)
    assert EMBEDDED.head == model.lm_head.weight.numel()
    assert EMBEDDED.is_fused


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-7b", 7.62), ("llama-3-8b", 8.03), ("llama-2-13b", 13.02), ("llama-3-70b", 70.55), ("gpt-3-175b", 174.6)],
)
def test_known_shapes_have_their_published_sizes(name, billions):
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_known_name_makes_a_shape():
    for name in set(KNOWN) - {"gpt-3-175b", "llama-3-70b", "qwen2.5-72b"}:  # those are above, and slow
        shape = shape_of(name)
        assert shape.is_fused
        assert shape.parameters > 1e8


@pytest.mark.parametrize("rank", [4, 16])
def test_adapters_are_counted_as_peft_makes_them(rank):
    policy = Policy(PolicyConfig(lora_rank=rank))
    assert EMBEDDED.adapters(rank) == sum(p.numel() for p in policy.parameters() if p.requires_grad)


def test_methods_are_what_their_classes_say():
    by_file = {name.lower(): cls for name, cls in CLASSES.items()}
    assert {name.replace("_", "") for name in METHODS} == set(by_file)
    for name, parts in METHODS.items():
        cls = by_file[name.replace("_", "")]
        made = cls()
        assert parts.reference == getattr(made, "needs_reference", False), name
        owned = hasattr(made, "critic_model") and not made.needs_value_head
        assert parts.critic == (owned or hasattr(made, "value_model")), name
        assert parts.samples == hasattr(made, "advantages") or name in ("online_dpo", "direct_alignment_po"), name


def _saved(policy: Policy, ids: torch.Tensor, prompt: int, short: bool) -> int:
    """Bytes that autograd keeps of a forward pass, without the weights."""
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    mask = torch.ones_like(ids).bool()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", enabled=short):
        policy(ids, mask, mask[:, prompt:])
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    return sum(size for place, size in seen.items() if place not in own)


@pytest.mark.parametrize("short", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
def test_activations_are_what_autograd_keeps(short, rank):
    prompt, response, rows, group = 40, 88, 8, 4
    policy = Policy(PolicyConfig(lora_rank=rank, chunk_tokens=64))
    ids = torch.randint(5, 200, (rows, prompt + response), generator=torch.Generator().manual_seed(0))
    ids[:, :prompt] = ids[::group, :prompt].repeat_interleave(group, 0)
    kept = _saved(policy, ids, prompt, short)
    setting = Setting("lora" if rank else "full", rank or 16, "bf16-mixed" if short else "32-true", on_cpu=True)
    work = Workload(rows, prompt, response, group)
    tokens = 2 * prompt + rows * response
    pairs = 2 * prompt**2 + rows * response * (prompt + response)
    expected = kept_activations(EMBEDDED, setting, work, tokens, pairs)
    expected += 2.0 * EMBEDDED.projections if short else 0  # weights in bfloat16
    assert kept == pytest.approx(expected, rel=0.1)


def test_lasting_parts_are_exact():
    full = estimate(EMBEDDED, METHODS["grpo"], Setting(), WORK).parts
    n = EMBEDDED.parameters
    assert (full["weights"], full["reference"], full["gradients"], full["optimizer"]) == (4 * n, 4 * n, 4 * n, 8 * n)
    lora = estimate(EMBEDDED, METHODS["grpo"], Setting("lora", 8, base_dtype="bfloat16"), WORK).parts
    trained = EMBEDDED.adapters(8)
    assert "reference" not in lora  # the adapter switched off
    assert (lora["weights"], lora["gradients"]) == (2 * n + 4 * trained, 4 * trained)
    four_bits = estimate(EMBEDDED, METHODS["sft"], Setting("qlora", 8), WORK).parts
    assert four_bits["weights"] == NF4 * EMBEDDED.projections + 2 * (n - EMBEDDED.projections) + 4 * trained
    assert math.isclose(NF4, 0.516, abs_tol=5e-4)


def test_a_critic_is_a_second_model():
    alone = estimate(EMBEDDED, METHODS["dapo"], Setting(), WORK).parts
    ppo = estimate(EMBEDDED, replace(METHODS["ppo"], reference=False), Setting(), WORK).parts
    body = EMBEDDED.parameters  # its output layer is tied: nothing of its own is left out
    assert ppo["critic"] == 4 * body
    assert ppo["optimizer"] - alone["optimizer"] == 8 * body


@pytest.mark.parametrize(
    ("sharding", "divided"),
    [
        (Sharding(optimizer=4), {"optimizer"}),
        (Sharding(optimizer=4, gradients=4), {"optimizer", "gradients"}),
        (Sharding(optimizer=4, gradients=4, weights=4), {"optimizer", "gradients", "weights", "reference"}),
    ],
)
def test_sharding_divides_what_it_names(sharding, divided):
    whole = estimate(EMBEDDED, METHODS["grpo"], Setting(), WORK).parts
    spread = estimate(EMBEDDED, METHODS["grpo"], Setting(), WORK, sharding).parts
    for name in ("weights", "gradients", "optimizer", "reference"):
        assert spread[name] == whole[name] / (4 if name in divided else 1), name
    assert ("gathered weights" in spread) == ("weights" in divided)


def test_offloading_leaves_the_gpu():
    sharding = Sharding(optimizer=2, gradients=2, weights=2, offload_optimizer=True, offload_weights=True)
    parts = estimate(EMBEDDED, METHODS["sft"], Setting(), WORK, sharding).parts
    assert not {"weights", "optimizer", "gradients", "optimizer's workspace"} & set(parts)


@pytest.mark.parametrize("name", ["rows", "prompt", "response"])
def test_more_work_takes_more(name):
    more = replace(WORK, **{name: 2 * getattr(WORK, name)})
    less, greater = (estimate(EMBEDDED, METHODS["grpo"], Setting(), work).total("update") for work in (WORK, more))
    assert greater > less


def test_checkpointing_and_short_floats_save_activations():
    work = replace(WORK, rows=64)
    plain = estimate(EMBEDDED, METHODS["sft"], Setting(precision="32-true"), work).parts["activations"]
    short = estimate(EMBEDDED, METHODS["sft"], Setting(), work).parts["activations"]
    saving = estimate(EMBEDDED, METHODS["sft"], Setting(), replace(work, checkpointing=True)).parts["activations"]
    assert saving < 0.5 * short < 0.5 * plain


def test_waste_is_on_what_comes_and_goes():
    found = estimate(EMBEDDED, METHODS["sft"], Setting(), WORK)
    wasteful = copy.deepcopy(found)
    wasteful.waste, wasteful.overhead = 1.0, 100.0
    parts = found.phases["update"]
    passing = sum(size for name, size in parts.items() if name not in ("weights", "optimizer"))
    assert wasteful.total("update") - found.total("update") == pytest.approx(100 + passing)
