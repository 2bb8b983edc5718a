"""The decision tree: every way through it, by flags and by questions."""

import builtins
import sys
from pathlib import Path

import pytest

import rlalign.cli.trainer  # noqa: F401  before any test captures what its loggers write to
from rlalign.cli import main
from rlalign.cli.recommend import METHODS, QUESTIONS, Unanswered, decide, flags
from rlalign.cli.stages import StageParser

ROOT = Path(__file__).resolve().parents[2]


def ways(node: str = "data") -> list[list[tuple[str, str]]]:
    """Every way from a question down: flags with answers."""
    if node in METHODS:
        return [[]]
    question = QUESTIONS[node]
    return [[(question.flag, name), *rest] for name, answer in question.answers.items() for rest in ways(answer.then)]


WAYS = ways()


@pytest.fixture
def on_terminal(monkeypatch):
    """Somebody who types these lines."""

    def typed(*lines: str):
        left = list(lines)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

        def answer(prompt=""):
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr(builtins, "input", answer)
        return left

    return typed


def test_the_tree_leads_somewhere_and_everywhere():
    ends = {decide(lambda q, way=dict(way): way[q.flag])[1].name for way in WAYS}
    assert ends == {method.name for method in METHODS.values()}
    reached = {answer.then for question in QUESTIONS.values() for answer in question.answers.values()}
    assert reached | {"data"} == set(QUESTIONS) | set(METHODS)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_every_configuration_that_is_named_is_there(method, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert [file for file in method.files if not (ROOT / file).is_file()] == []
    words = method.command.split()
    assert words[:2] == ["rlalign", "fit" if method.pipeline is None else "pipeline"]
    if method.pipeline is None:
        made = StageParser(words[1:]).settings["model"]["class_path"].rpartition(".")[2]
        assert made == method.name


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ("--data checks --aim fast", "DirectAlignmentPO"),
        ("--data feedback --aim fast", "DirectAlignmentPO"),
        ("--data feedback --aim best", "SFT, a reward model, PPO"),
        ("--data pairs --compute enough", "SFT, a reward model, PPO"),
        ("--data pairs --compute little", "DPO"),
        ("--data labels", "KTO"),
        ("--data demonstrations", "SFT"),
        ("--data nothing", "DirectAlignmentPO, in rounds"),
        ("--data checks --aim best --compute little", "ValueResponse"),
        ("--data checks --aim best --compute enough --start rarely", "SFT, then DAPO"),
        ("--data checks --aim best --compute enough --start sometimes --model moe", "GSPO"),
        ("--data checks --aim best --compute enough --start sometimes --model dense --answers long", "DAPO"),
        (
            "--data checks --aim best --compute enough --start sometimes --model dense --answers short",
            "DirectAlignmentPO, GRPO, ValueResponse",
        ),
    ],
)
def test_flags_lead_to_a_method_with_reasons_and_a_command(options, method, capsys):
    assert main(["recommend", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert f"Recommended: {method}." in shown
    found = next(m for m in METHODS.values() if m.name == method)
    assert found.command in shown
    asked, _ = decide(lambda q: dict(zip(options.split()[::2], options.split()[1::2], strict=True))[f"--{q.flag}"])
    for question, given in asked:
        assert question.answers[given].why in shown
        assert f"--{question.flag} {given}" in shown


def test_which_rlvr_is_meant(capsys):
    main(["recommend", *["--data", "checks", "--aim", "best", "--compute", "little"]])
    shown = capsys.readouterr().out
    assert "An article calls this RLVR; in the papers, RLVR is any method with verifiable rewards" in shown


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ("", "--data checks|feedback|pairs|labels|demonstrations|nothing"),
        ("--data checks", "--aim fast|best"),
        ("--data pairs", "--compute little|enough"),
        ("--data checks --aim best --compute enough --start sometimes", "--model moe|dense"),
    ],
)
def test_without_a_terminal_the_missing_flag_is_named(options, missing, capsys):
    assert main(["recommend", *options.split()]) == 2
    said = capsys.readouterr().err
    assert missing in said
    assert len(said.splitlines()) == 1


def test_what_makes_no_difference_is_told(capsys):
    main(["recommend", *["--data", "labels", "--compute", "little", "--answers", "long"]])
    assert "It makes no difference here: --compute, --answers." in capsys.readouterr().out


def test_an_unknown_answer_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["recommend", "--data=pears"])
    assert "invalid choice: 'pears'" in capsys.readouterr().err


def test_on_a_terminal_it_asks_for_what_no_flag_says(on_terminal, capsys):
    left = on_terminal("7", "²", "3", "little")
    assert main(["recommend"]) == 0
    assert not left
    shown = capsys.readouterr().out
    assert shown.count("Answer with a number, or one of checks, feedback") == 2
    assert "Recommended: DPO." in shown
    left = on_terminal("enough")
    assert main(["recommend", "--data=pairs"]) == 0
    assert not left
    assert "Recommended: SFT, a reward model, PPO." in capsys.readouterr().out


def test_who_leaves_is_let_go(on_terminal):
    on_terminal("checks")
    assert main(["recommend"]) == 130


def test_flags_have_the_same_answers_wherever_they_are_asked():
    for question in QUESTIONS.values():
        assert set(question.answers) == set(flags()[question.flag])
    with pytest.raises(Unanswered):
        decide(lambda question: None)


@pytest.mark.parametrize("options", ["--data pairs --compute little", "--data checks --aim fast", "--data labels"])
def test_the_line_for_a_model_and_data_of_one_s_own_is_understood(options, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["recommend", *options.split()])
    shown = capsys.readouterr().out.replace("\\\n", " ")
    (line,) = (line for line in shown.splitlines() if "MODEL" in line)
    made = StageParser([word for word in line.split()[1:] if not word.startswith(("--run", "mine"))]).settings
    assert made["model"]["init_args"]["policy"]["model"] == "MODEL"
    assert (made["data"]["init_args"]["train"], made["data"]["init_args"]["num_held_out"]) == ("FILE", 200)
    assert made["data"]["init_args"]["val"] is None
