import subprocess
import sys
from pathlib import Path

import pytest

from rlalign import __version__
from rlalign.cli import COMMANDS, main

HEAVY = ("torch", "lightning", "transformers", "jsonargparse", "peft")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option):
    program = (
        f"import sys; from rlalign.cli import main; status = main(['{option}']); "
        f"print([m for m in {HEAVY} if m in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlalign {__version__}\n"


def test_unknown_command_names_the_nearest(capsys):
    assert main(["fitt"]) == 2
    assert "did you mean 'fit'" in capsys.readouterr().err


def test_the_folder_one_works_in_is_where_ones_own_classes_are(tmp_path):
    (tmp_path / "my_method.py").write_text("from rlalign.algorithms.grpo import GRPO\n\nclass Mine(GRPO): pass\n")
    command = [str(Path(sys.executable).parent / "rlalign"), "fit", "--model=my_method.Mine", "--data.train=x"]
    done = subprocess.run(
        [*command, "--data.rewards={}", "--print_config"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "class_path: my_method.Mine" in done.stdout, done.stderr
