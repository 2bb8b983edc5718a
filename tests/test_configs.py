"""Every file under configs/ parses; every algorithm's file trains as it is, at smaller sizes."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from rlalign.cli import main

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
BASE = CONFIGS / "base.yaml"
CURRICULUM = CONFIGS / "curriculum.yaml"
ALGORITHMS = sorted(set(CONFIGS.glob("*.yaml")) - {BASE, CURRICULUM})
TINY = sorted(CONFIGS.glob("tiny/*.yaml"))
STRATEGIES = sorted(CONFIGS.glob("strategies/*.yaml"))
PEFT = sorted(CONFIGS.glob("peft/*.yaml"))
SAMPLERS = sorted(CONFIGS.glob("samplers/*.yaml"))  # that they sample: make test-vllm
SMOLLM2 = sorted(CONFIGS.glob("smollm2/*.yaml"))
PIPELINES = sorted(CONFIGS.glob("pipelines/*.yaml"))  # tests/cli/test_pipeline.py
TASKS = sorted(CONFIGS.glob("tasks/*.yaml"))
SHORT = [
    "--trainer.max_epochs=1",
    "--trainer.check_val_every_n_epoch=1",
    "--data.init_args.prompts_per_iteration=4",
    "--data.init_args.step_size=null",
    "--data.init_args.val_limit=4",
]
OFFLINE: dict[str, list[str]] = {}
SHORT_RESPONSES = ["--data.init_args.group_size=2", "--data.init_args.sampling.max_new_tokens=12"]


def name_of(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def parse(capsys, *configs: Path) -> dict:
    """The whole configuration of a run with these files."""
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *(f"--config={path}" for path in configs), "--print_config"])
    printed = capsys.readouterr()
    assert exit_.value.code == 0, printed.err
    return yaml.safe_load(printed.out[printed.out.index("seed_everything:") :])  # DeepSpeed's log comes before it


def test_every_file_has_a_test():
    known = {BASE, CURRICULUM, *ALGORITHMS, *TINY, *TASKS, *STRATEGIES, *PEFT, *SAMPLERS, *SMOLLM2, *PIPELINES}
    known |= set(CONFIGS.glob("sweeps/*.yaml"))
    assert {name_of(path) for path in CONFIGS.rglob("*.y*ml")} == {name_of(path) for path in known}
    assert {"grpo", "dapo"} <= {path.stem for path in TINY}
    assert {path.name for path in ALGORITHMS} == {path.name for path in TINY}, "each method has both files"
    assert STRATEGIES


@pytest.mark.parametrize("path", [*ALGORITHMS, *TINY, *SMOLLM2], ids=name_of)
def test_a_file_parses_on_top_of_base(path, capsys):
    given = yaml.safe_load(path.read_text())
    config = parse(capsys, BASE, path)
    assert config["model"]["class_path"].rsplit(".", 1)[-1] == given["model"]["class_path"].rsplit(".", 1)[-1]
    assert config["trainer"]["gradient_clip_val"] == given.get("trainer", {}).get("gradient_clip_val", 1.0)


@pytest.mark.parametrize("path", STRATEGIES, ids=name_of)
def test_a_strategy_is_added_to_any_run(path, capsys):
    given = yaml.safe_load(path.read_text())["trainer"]["strategy"]
    strategy = parse(capsys, BASE, CONFIGS / "tiny" / "grpo.yaml", path)["trainer"]["strategy"]
    assert strategy["class_path"] == given["class_path"]
    assert given["init_args"].items() <= strategy["init_args"].items()


@pytest.mark.parametrize("path", SAMPLERS, ids=name_of)
def test_a_sampler_is_added_to_any_run(path, capsys):
    given = yaml.safe_load(path.read_text())["data"]["init_args"]["sampler"]
    sampler = parse(capsys, BASE, CONFIGS / "tiny" / "grpo.yaml", path)["data"]["init_args"]["sampler"]
    assert has(sampler, given)


def has(whole: dict, part: dict) -> bool:
    """Whether all that is given is there, at any depth."""
    return all(
        has(whole[key], value) if isinstance(value, dict) else whole[key] == value for key, value in part.items()
    )


def short(path: Path) -> list[str]:
    """Options that make one small iteration of a run with this file."""
    data = yaml.safe_load(path.read_text()).get("data", {}).get("class_path", "RolloutDataModule")
    if data != "RolloutDataModule":
        every = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
        return [*every, "--data.init_args.steps_per_epoch=2", *OFFLINE.get(path.stem, [])]
    return SHORT if path in TINY else [*SHORT, *SHORT_RESPONSES]


@pytest.mark.parametrize("path", [*ALGORITHMS, *TINY], ids=name_of)
def test_an_algorithm_trains_as_it_is(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # the command sets it: what is noted here is undone after the test
    monkeypatch.delenv("RLALIGN_RUN")
    assert main(["fit", f"--config={BASE}", f"--config={path}", "--run=short", *short(path)]) == 0
    folder = tmp_path / "runs" / "short"
    row = list(csv.DictReader((folder / "metrics.csv").open()))[-1]
    assert int(row["step"]) >= 1
    if path in TINY:
        assert 0 <= float(row.get("val/pass@1") or row["val/accuracy"]) <= 1
    names = {"config.yaml", "metrics.csv", "checkpoints"}
    assert names <= {file.name for file in folder.iterdir()}
    assert (folder / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("path", PEFT, ids=name_of)
def test_a_way_to_train_fewer_numbers_is_added_to_any_run(path, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    configs = [f"--config={file}" for file in (BASE, CONFIGS / "tiny" / "grpo.yaml", path)]
    assert main(["fit", *configs, "--run=short", *SHORT]) == 0
    given = yaml.safe_load(path.read_text())["model"]["init_args"]
    kept = yaml.safe_load((tmp_path / "runs" / "short" / "config.yaml").read_text())["model"]["init_args"]
    assert given.get("policy", {}).items() <= kept["policy"].items()
    assert given.get("optimizer", kept["optimizer"])["class_path"] == kept["optimizer"]["class_path"]
    (row,) = csv.DictReader((tmp_path / "runs" / "short" / "metrics.csv").open())
    assert 0 <= float(row["val/pass@1"]) <= 1


GSM8K = {"question": "What is 2+3?", "answer": "2+3 is <<2+3=5>>5.\n#### 5"}
MBPP = {"prompt": "Write a function two() that returns 2.", "test_list": ["assert two() == 2"], "test_imports": []}
HUMANEVAL = {
    "task_id": "T/0",
    "prompt": "def two():\n",
    "entry_point": "two",
    "test": "def check(candidate):\n    assert candidate() == 2\n",
}
ROWS = {"gsm8k": (GSM8K, GSM8K), "mbpp": (MBPP, HUMANEVAL)}


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_a_task_is_added_to_any_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    options = []
    for split, row in zip(("train", "val"), ROWS.get(path.stem, ()), strict=False):
        text = "".join(
            json.dumps(row | {"prompt" if "prompt" in row else "question": f"{split} {i}? {row}"}) + "\n"
            for i in range(4)
        )
        (tmp_path / f"{split}.jsonl").write_text(text)
        options.append(f"--data.init_args.{split}={split}.jsonl")
    options += ["--data.init_args.sampling.max_new_tokens=6"]
    configs = [f"--config={file}" for file in (BASE, CONFIGS / "tiny" / "grpo.yaml", path)]
    assert main(["fit", *configs, "--run=short", *SHORT, *options]) == 0
    (row,) = csv.DictReader((tmp_path / "runs" / "short" / "metrics.csv").open())
    assert 0 <= float(row["val/pass@1"]) <= 1
    assert float(row["rollout/unavailable_share"]) == 0


def test_the_curriculum_is_added_to_any_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    configs = [f"--config={file}" for file in (BASE, CONFIGS / "tiny" / "grpo.yaml", CURRICULUM)]
    assert main(["fit", *configs, "--run=short", *SHORT]) == 0
    (row,) = csv.DictReader((tmp_path / "runs" / "short" / "metrics.csv").open())
    assert float(row["rollout/curriculum/unseen_share"]) == 1
