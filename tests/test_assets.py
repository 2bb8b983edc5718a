"""The embedded model and its arithmetic problems."""

import importlib.util
import json
import random
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rlalign.assets import ARITHMETIC, EMBEDDED_MODEL, resolve

SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def load_script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load_script("build_asset")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def unordered(question: str) -> tuple[str, ...]:
    """A question as what it asks: the terms of a sum in any order."""
    return tuple(sorted(question.removesuffix("=").split("+")))


def test_the_model_is_small(model: LlamaForCausalLM) -> None:
    assert sum(file.stat().st_size for file in EMBEDDED_MODEL.iterdir()) < 3_000_000
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_200_000
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings >= 256
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters()), "saved in more than bfloat16"


def test_model_and_tokenizer_agree_on_the_special_tokens(model: LlamaForCausalLM, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert config.bos_token_id is None
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"


def test_the_generation_config_sets_no_sampling_option_kf51(model: LlamaForCausalLM) -> None:
    options = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    assert [getattr(model.generation_config, option) for option in options] == [None] * len(options)


def test_a_chat_renders_to_single_special_tokens_and_back_kf37(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "37+58="},
        {"role": "assistant", "content": "95"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|system|>Add.<|end|><|user|>37+58=<|end|><|assistant|>95<|end|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == tokenizer(text).input_ids, "the tokenizer adds tokens of its own to a rendered chat"
    assert tokenizer.decode(ids) == text
    counts = Counter(tokenizer.convert_ids_to_tokens(ids))
    assert [counts[token] for token in SPECIALS] == [0, 3, 1, 1, 1]
    # 3 roles, 3 ends, and a token for each of the 12 characters.
    assert len(ids) == 3 + 3 + len("Add.37+58=95")


def test_the_generation_prompt_is_a_prefix_of_the_whole_chat_kf45(tokenizer: Any) -> None:
    user, assistant = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([user, assistant], return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == "3<|end|>"


def test_the_script_demonstrates_what_the_template_renders(build: ModuleType, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    ids, mask = build.encode(
        tokenizer, [(build.Problem("1+2=", "3", 1), "3"), (build.Problem("10+10=", "20", 2), "20")]
    )
    expected = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    width = len(expected["input_ids"])
    assert ids[0].tolist() == expected["input_ids"] + [tokenizer.pad_token_id] * (ids.shape[1] - width)
    assert mask[0].tolist() == [bool(m) for m in expected["assistant_masks"]] + [False] * (ids.shape[1] - width)


def test_the_assistant_mask_covers_the_answers_and_their_end_kf44(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "9+2="},
        {"role": "assistant", "content": "11"},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    masked = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(masked) == "3<|end|>11<|end|>"


def test_the_template_renders_missing_content_as_nothing_and_refuses_an_unknown_role_kf94(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template([{"role": "user", "content": None}], tokenize=False) == "<|user|><|end|>"
    with pytest.raises(Exception, match="The role 'tool' is not one of system, user, assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("text", ["Hello, world!\n 12 + 3 = 15", "  two  spaces ,  and a tab\t.", "naïve — 数学 ∑ 🙂"])
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())


@pytest.mark.parametrize("name", ["train", "val"])
def test_every_answer_is_right(name: str) -> None:
    for row in rows(name):
        assert set(row) == {"question", "answer", "level"}
        left, sign, right = re.fullmatch(r"(\d+)([+-])(\d+)=", row["question"]).groups()  # type: ignore[union-attr]
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert row["answer"] == str(value)
        level = 3 if sign == "-" else 1 if min(len(left), len(right)) == 1 else 2
        assert row["level"] == level


def test_levels_are_balanced_and_rows_distinct() -> None:
    for name, size in (("train", 2100), ("val", 300)):
        assert Counter(row["level"] for row in rows(name)) == dict.fromkeys((1, 2, 3), size // 3)
        assert len({row["question"] for row in rows(name)}) == size


def test_validation_problems_occur_neither_in_training_nor_in_demonstrations(build: ModuleType) -> None:
    _, _, demonstrations = build.split_problems()
    held_out = {unordered(row["question"]) for row in rows("val")}
    assert not held_out & {unordered(row["question"]) for row in rows("train")}
    assert not held_out & {unordered(problem.question) for problem in demonstrations}
    assert len(demonstrations) > 10_000


def test_the_script_writes_the_shipped_data(build: ModuleType, tmp_path: Path) -> None:
    train, val, _ = build.split_problems()
    for name, problems in (("train", train), ("val", val)):
        build.write_problems(problems, tmp_path / f"{name}.jsonl")
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (ARITHMETIC / f"{name}.jsonl").read_bytes()


def test_the_script_of_pairs_makes_the_shipped_ones() -> None:
    script = load_script("build_pairs")
    data = script.load_prompts("embedded:arithmetic/train.jsonl", AutoTokenizer.from_pretrained(EMBEDDED_MODEL))
    shipped = {row["prompt"]: row for row in [*rows("pairs"), *rows("pairs_val")]}
    prompts = [data[i] for i in range(150)]
    made = [script.make_pair(prompt, texts) for prompt, texts in zip(prompts, script.answers(prompts), strict=True)]
    common = [pair for pair in made if pair and pair["prompt"] in shipped]
    assert len(common) > 100
    # Which of two equally likely tokens is drawn may differ with the rounding of another machine.
    assert sum(pair == shipped[pair["prompt"]] for pair in common) >= len(common) - 3


def test_the_script_makes_the_shipped_tokenizer(build: ModuleType, tokenizer: Any) -> None:
    built = build.build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("question", "answer", "forgotten"),
    [
        ("37+58=", "95", "85"),
        ("7+3=", "10", "0"),
        ("31+58=", "89", None),
        ("52-37=", "15", "25"),
        ("57-32=", "25", None),
    ],
)
def test_the_forgotten_carry(build: ModuleType, question: str, answer: str, forgotten: str | None) -> None:
    assert build.forgotten_carry(build.Problem(question, answer, 0)) == forgotten


def test_wrong_demonstrations_are_wrong_numbers(build: ModuleType) -> None:
    rng = random.Random(0)
    for problem in build.split_problems()[1]:
        answers = {build.wrong_answer(problem, rng) for _ in range(100)}
        assert problem.answer not in answers
        assert all(str(int(answer)) == answer and int(answer) >= 0 for answer in answers)
        assert len(answers) > 1


def test_the_model_starts_half_taught(build: ModuleType, model: LlamaForCausalLM, tokenizer: Any) -> None:
    problems = [build.Problem(**row) for row in rows("val")[:150]]
    right = build.solve(model, tokenizer, problems, samples=8, seed=1)
    assert 0.30 <= right.float().mean() <= 0.50
    assert right.any(dim=1).float().mean() > 0.90
    levels = torch.tensor([problem.level for problem in problems])
    easy, middle, hard = (right[levels == level].float().mean() for level in (1, 2, 3))
    assert easy > middle > hard > 0.2


def test_resolve_maps_the_names_of_embedded_assets() -> None:
    assert Path(resolve("embedded")) == EMBEDDED_MODEL
    assert Path(resolve("embedded:arithmetic/val.jsonl")) == ARITHMETIC / "val.jsonl"
    assert Path(resolve("embedded")).is_dir()
    assert Path(resolve("embedded:arithmetic/train.jsonl")).is_file()


@pytest.mark.parametrize("path", ["embedded/x", "./embedded", "HuggingFaceTB/SmolLM2-135M", "data/train.jsonl", ""])
def test_resolve_leaves_other_paths_alone(path: str) -> None:
    assert resolve(path) == path


@pytest.mark.parametrize("path", ["embedded:arithmetic/tset.jsonl", "embedded:", "embedded:../assets/__init__.py"])
def test_resolve_names_what_exists(path: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        resolve(path)
    assert str(error.value) == (
        f"There is no embedded file '{path}'; there are embedded:arithmetic/pairs.jsonl, "
        "embedded:arithmetic/pairs_val.jsonl, embedded:arithmetic/train.jsonl, embedded:arithmetic/val.jsonl, and the "
        "model 'embedded'."
    )
