"""The ``rlalign`` command; what a subcommand needs is imported when it is called."""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from rlalign import __version__

COMMANDS = {
    "fit": ("rlalign.cli.trainer:main", "Train a policy."),
    "validate": ("rlalign.cli.trainer:main", "Measure a policy or checkpoint on the held-out prompts."),
    "test": ("rlalign.cli.trainer:main", "The same, under the name of a final test."),
    "predict": ("rlalign.cli.trainer:main", "Write responses to the held-out prompts."),
    "check": ("rlalign.cli.check:main", "Show what the model will see, without training; arguments as for fit."),
    "pipeline": ("rlalign.cli.pipeline:main", "Run several stages, each from where the one before ended."),
    "recommend": ("rlalign.cli.recommend:main", "Say which method to use, why, and how to run it."),
    "plan": ("rlalign.cli.plan:main", "Say what fits on which GPUs, with which strategy, and how to run it."),
    "export": ("rlalign.cli.export:main", "Turn a checkpoint into a Hugging Face folder."),
}
"""Command -> where its ``main(argv)`` is, and what it does."""

OTHER_WORDS = {"train": "fit", "run": "fit", "eval": "validate", "evaluate": "validate", "generate": "predict"}
"""What others call a command."""


def usage() -> str:
    """The overview that ``rlalign --help`` prints."""
    rows = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: rlalign COMMAND ...\n\nAlign language models with reinforcement learning.\n\ncommands:\n{rows}\n\n"
        "  rlalign fit --config configs/base.yaml --config configs/tiny/grpo.yaml --run first\n"
        "  rlalign COMMAND --help tells the options of a command.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if argv[0] == "--version":
        print(f"rlalign {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        near = OTHER_WORDS.get(argv[0]) or difflib.get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.0)[0]
        print(f"rlalign: there is no command '{argv[0]}'; did you mean '{near}'? See rlalign --help.", file=sys.stderr)
        return 2
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # classes and rewards of one's own, by name, from the folder one works in
    module, function = COMMANDS[argv[0]][0].split(":")
    status: int = getattr(import_module(module), function)(argv)
    return status
