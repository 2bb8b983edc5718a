"""Plans: the articles' table, and what is recommended."""

import pytest
import yaml

from rlalign.planning.hardware import STRATEGIES, parse_gpus
from rlalign.planning.plan import Request, best, command, options_of
from rlalign.planning.shapes import shape_of


def plan(model, gpus, method="grpo", pefts=("full", "lora", "qlora"), **kwargs):
    request = Request(shape_of(model), method, parse_gpus(gpus), pefts=pefts, **kwargs)
    return request, options_of(request)


@pytest.mark.parametrize(
    ("model", "gpus", "method", "peft", "strategies"),
    [
        ("qwen2.5-3b", "1x24GB", "grpo", "lora", {"single"}),  # below 7B: one GPU of 24 GB
        ("qwen2.5-3b", "4x24GB", "grpo", "lora", {"ddp"}),  # or data parallel
        ("qwen2.5-7b", "4xA100-40GB", "grpo", "lora", {"ddp"}),  # 7B: 4 to 8 of 40 GB
        ("qwen2.5-7b", "8xA100-40GB", "sft", "full", {"zero2", "fsdp2", "zero3"}),
        ("llama-2-13b", "8xA100-80GB", "grpo", "full", {"zero2", "fsdp2", "zero3"}),  # 13B: 8 to 16 of 80 GB
        ("llama-2-13b", "16xA100-80GB", "grpo", "full", {"zero2", "fsdp2", "zero3"}),
        ("llama-3-70b", "16xH100-80GB", "sft", "lora", {"fsdp2", "zero3"}),  # to 70B: spread
        ("llama-3-70b", "32xH100-80GB", "sft", "full", {"fsdp2", "zero3"}),
        ("gpt-3-175b", "32xA100-80GB", "sft", "lora", {"fsdp2", "zero3", "fsdp2_tp"}),  # 175B: 32 and more of 80 GB
        ("gpt-3-175b", "64xA100-80GB", "sft", "full", {"fsdp2", "zero3", "fsdp2_tp"}),
    ],
)
def test_the_articles_rows_fit(model, gpus, method, peft, strategies):
    _, ways = plan(model, gpus, method, (peft,))
    chosen = best(ways)
    assert chosen is not None
    assert chosen.strategy.name in strategies


@pytest.mark.parametrize(
    ("model", "gpus", "method"),
    [("qwen2.5-7b", "1x24GB", "sft"), ("llama-2-13b", "4xA100-40GB", "sft"), ("llama-3-70b", "8xA100-40GB", "sft")],
)
def test_all_weights_do_not_fit_on_fewer(model, gpus, method):
    _, ways = plan(model, gpus, method, ("full",))
    assert not any(way.fits for way in ways if "offload" not in way.strategy.name)


def test_a_larger_gpu_takes_a_larger_minibatch_and_none_is_too_large():
    sizes = []
    for gpus in ("1x24GB", "1x40GB", "1x80GB"):
        request, ways = plan("qwen2.5-0.5b", gpus, pefts=("full",))
        way = next(w for w in ways if w.strategy.name == "single" and not w.checkpointing)
        assert way.found.peak <= request.gpus.gib * 2**30
        assert request.step_size % (way.rows * way.ranks) == 0
        sizes.append(way.rows)
    assert sizes == sorted(set(sizes))


def test_the_host_is_used_only_where_nothing_else_fits():
    _, ways = plan("gpt-3-175b", "32xA100-80GB", "sft", ("full",))
    assert best(ways).strategy.name == "zero3_offload"
    _, ways = plan("qwen2.5-0.5b", "2xH100", "sft", ("full",))
    assert "offload" not in best(ways).strategy.name


def test_what_is_sampled_at_once_is_halved_until_it_fits():
    _, ways = plan("llama-2-13b", "1xA100-80GB", pefts=("lora",), sampled=4096)
    assert best(ways).sampled < 4096


def test_the_command_names_what_was_planned():
    request, ways = plan("qwen2.5-7b", "8xA100-40GB", pefts=("lora",))
    way = best(ways)
    words = command(request, way).replace("\\\n", " ").split()
    options = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    rows, accumulate = (int(options[n]) for n in ("data.init_args.minibatch_size", "trainer.accumulate_grad_batches"))
    assert rows * accumulate * way.ranks == request.step_size == int(options["data.init_args.step_size"])
    assert "configs/strategies/ddp.yaml" in words
    assert "configs/peft/lora.yaml" in words


@pytest.mark.parametrize(
    ("text", "count", "gib"),
    [("8xA100-40GB", 8, 40), ("1x24GB", 1, 24), ("2xH100", 2, 80), ("A100-80GB", 1, 80), ("4xl40s", 4, 48)],
)
def test_gpus_are_read_as_people_write_them(text, count, gib):
    gpus = parse_gpus(text)
    assert (gpus.count, gpus.gib) == (count, gib)


@pytest.mark.parametrize("text", ["", "8x", "0xA100", "8xFoo", "eight", "8xA100-0GB"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="8xA100-40GB"):
        parse_gpus(text)


def test_each_strategy_has_its_file(pytestconfig):
    for strategy in STRATEGIES:
        if strategy.config:
            path = pytestconfig.rootpath / "configs" / "strategies" / f"{strategy.config}.yaml"
            assert "strategy" in yaml.safe_load(path.read_text())["trainer"], path
