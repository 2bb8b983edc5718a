"""What the README and the pages of docs/ say can be done."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import rlalign.cli.export
from rlalign.cli import main
from rlalign.cli.stages import read_stages

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The README's command lines, in words, without comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def printed_config(words: list[str], capsys) -> str:
    """The configuration that a command line asks for, as the command itself prints it."""
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--print_config"])
    printed = capsys.readouterr()
    assert exit_.value.code == 0, printed.err
    return printed.out[printed.out.index("seed_everything:") :]  # some library's log may come before it


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder with the repository's configurations and what the README takes for granted."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my_rewards.py").write_text("def short(example, response):\n    return float(len(response) < 200)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_commands_set_everything_up():
    assert [" ".join(words) for words in commands()][:2] == ["make quickstart", "make test"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([\w-]+)`", README) + [words[1] for words in commands() if words[0] == "make"]
    assert set(named) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    quoted = re.findall(r"`((?:rlalign|configs|docs|tests|scripts|notebooks)/[^` ]*)`", text)
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    missing = [name for name in quoted if not (ROOT / name).exists()]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert missing == []


def test_every_command_line_parses(elsewhere, monkeypatch, capsys):
    exported = []
    monkeypatch.setattr(rlalign.cli.export, "export", lambda *args, **kwargs: exported.append((args, kwargs)))
    seen = set()
    for words in commands():
        if words[0] == "rlalign" and words[1] in ("export", "recommend", "plan"):
            assert main(words[1:]) == 0
        elif words[:2] == ["rlalign", "pipeline"]:
            assert read_stages(elsewhere / words[2], {})
        elif words[0] == "rlalign":
            text = printed_config(words[1:], capsys)
            run = elsewhere / "runs" / "first"
            if not run.exists():
                run.mkdir(parents=True)
                (run / "config.yaml").write_text(text)  # what the run itself would leave, for the commands after it
        elif words[0] != "make":
            assert words[:1] == [".venv/bin/python"]
            assert all((ROOT / word).exists() for word in words[1:] if "/" in word)
        seen.add(words[1])
    assert {"fit", "check", "validate", "export", "recommend", "plan", "pipeline"} <= seen
    assert len(exported) == 1


def test_the_configuration_of_ones_own_data_parses(elsewhere, capsys):
    (block,) = blocks("yaml")
    (elsewhere / "mine.yaml").write_text(block)
    configs = ["configs/base.yaml", "configs/tiny/grpo.yaml", "mine.yaml"]
    config = yaml.safe_load(printed_config(["fit", *(f"--config={name}" for name in configs)], capsys))
    assert config["model"]["init_args"]["policy"]["lora_rank"] == 16
    assert set(config["data"]["init_args"]["rewards"]) == {"correct", "short"}
    assert config["data"]["init_args"]["num_held_out"] == 200


def test_papers_are_those_that_the_code_cites():
    pattern = re.compile(r"\b(\d{4}\.\d{5})\b")
    cited = {paper for path in (ROOT / "rlalign").rglob("*.py") for paper in pattern.findall(path.read_text())}
    listed = set(pattern.findall((ROOT / "docs" / "papers.md").read_text()))
    assert cited == listed


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180


def test_the_method_of_ones_own_trains(tmp_path, monkeypatch):
    (code,) = blocks("python")
    (tmp_path / "my_method.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = ["--data.prompts_per_iteration=4", "--data.val_limit=4", "--trainer.max_epochs=1"]
    assert main(["fit", "--config", str(ROOT / "configs/base.yaml"), "--model=my_method.Reinforce", *small]) == 0
    (metrics,) = tmp_path.glob("runs/*/metrics.csv")
    assert "train/loss" in metrics.read_text()
