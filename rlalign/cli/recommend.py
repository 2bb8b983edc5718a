"""``rlalign recommend``: which method to use, why, and how to run it."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One answer to a question."""

    text: str
    """What it means."""
    why: str
    """What follows from it."""
    then: str
    """The next question, or the method, by its name in :data:`QUESTIONS` or :data:`METHODS`."""


@dataclass(frozen=True)
class Question:
    """A branch of the decision tree."""

    flag: str
    """The option that answers it."""
    text: str
    answers: Mapping[str, Answer]


@dataclass(frozen=True)
class Method:
    """A leaf of the tree."""

    name: str
    what: str
    """What it does, in a sentence."""
    config: str | None = None
    """Name of its files in ``configs`` and ``configs/tiny``."""
    pipeline: str | None = None
    """Name of its file in ``configs/pipelines``, for several methods in a row."""

    @property
    def files(self) -> list[str]:
        """The configurations that it names."""
        if self.pipeline is not None:
            return [f"configs/pipelines/{self.pipeline}.yaml"]
        return ["configs/base.yaml", f"configs/tiny/{self.config}.yaml", f"configs/{self.config}.yaml"]

    @property
    def command(self) -> str:
        """Runs it on the embedded model."""
        if self.pipeline is not None:
            return f"rlalign pipeline configs/pipelines/{self.pipeline}.yaml --run {self.pipeline}"
        configs = f"--config configs/base.yaml --config configs/tiny/{self.config}.yaml"
        return f"rlalign fit {configs} --run {self.config}"


QUESTIONS = {
    "data": Question(
        "data",
        "What tells a good response from a bad one?",
        {
            "checks": Answer(
                "a program: answers can be compared, tests can be run",
                "Rewards can be verified, so that the model may learn from as many responses of its own as it samples.",
                "aim",
            ),
            "feedback": Answer(
                "people, or a judge, who compare new responses of the model",
                "Preferences between the model's own responses say most about what it does now.",
                "aim_with_feedback",
            ),
            "pairs": Answer(
                "a file of pairs of responses, one preferred to the other",
                "Pairs can be learned from directly, or by way of a reward model.",
                "compute_with_pairs",
            ),
            "labels": Answer(
                "a file of single responses that were called good or bad",
                "Without pairs there is nothing to compare; KTO needs none.",
                "kto",
            ),
            "demonstrations": Answer(
                "a file of good responses, nothing else",
                "Nothing says what is worse, so that the model can imitate, and no more.",
                "sft",
            ),
            "nothing": Answer(
                "nothing: there are prompts alone",
                "The model has to judge its own responses: by answers that it gives often, or by a value function.",
                "self_improvement",
            ),
        },
    ),
    "aim": Question(
        "aim",
        "What matters more, quick results or the best ones?",
        {
            "fast": Answer(
                "quick iterations",
                "Pairs of its own responses, made by the check, need no reference, value function or advantages.",
                "direct",
            ),
            "best": Answer(
                "the best result", "Then the whole reward counts, not only which of two is better.", "compute"
            ),
        },
    ),
    "aim_with_feedback": Question(
        "aim",
        "What matters more, quick results or the best ones?",
        {
            "fast": Answer(
                "quick iterations",
                "Each comparison is learned from at once, without a reward model in between.",
                "direct",
            ),
            "best": Answer(
                "the best result",
                "Good feedback is worth a reward model: it generalises to responses that nobody has compared.",
                "rlhf",
            ),
        },
    ),
    "compute_with_pairs": Question(
        "compute",
        "How much compute is there?",
        {
            "little": Answer(
                "little", "Learning from the pairs as they are needs no sampling and no reward model.", "dpo"
            ),
            "enough": Answer(
                "enough to sample",
                "A reward model made of the pairs judges responses that are the model's own, not those of the file.",
                "rlhf",
            ),
        },
    ),
    "compute": Question(
        "compute",
        "How much compute is there?",
        {
            "little": Answer(
                "little",
                "A value function makes more of each response. (An article calls this RLVR; in the papers, RLVR is any "
                "method with verifiable rewards.)",
                "value",
            ),
            "enough": Answer("enough", "Then groups of responses can be sampled for every prompt.", "start"),
        },
    ),
    "start": Question(
        "start",
        "How often is the model right before training?",
        {
            "rarely": Answer(
                "rarely, or never in the right form",
                "A group without a right response teaches nothing: a few demonstrations come first.",
                "coldstart",
            ),
            "sometimes": Answer("sometimes", "Then its own right and wrong responses teach it.", "model"),
        },
    ),
    "model": Question(
        "model",
        "What kind of model is it?",
        {
            "moe": Answer(
                "a mixture of experts",
                "Ratios of single tokens jump when another expert is chosen; those of whole responses are steadier.",
                "gspo",
            ),
            "dense": Answer("a dense model", "Ratios of single tokens are steady enough.", "answers"),
        },
    ),
    "answers": Question(
        "answers",
        "How long are the responses?",
        {
            "long": Answer(
                "long: a chain of thought",
                "A loss over tokens, a wider upper clip, mixed groups and a soft length limit were made for that.",
                "dapo",
            ),
            "short": Answer("short", "The plain method is enough.", "hybrid"),
        },
    ),
}
"""The decision tree, from ``data`` on."""

METHODS = {
    "sft": Method("SFT", "imitates the demonstrations", "sft"),
    "dpo": Method("DPO", "raises preferred responses above the others, held by a reference", "dpo"),
    "kto": Method("KTO", "raises good responses and lowers bad ones, held by a reference", "kto"),
    "direct": Method(
        "DirectAlignmentPO", "prefers the best of a few sampled responses to a worse one", "direct_alignment_po"
    ),
    "value": Method("ValueResponse", "learns a value function of responses, and the policy from it", "value_response"),
    "gspo": Method("GSPO", "is GRPO with one importance ratio a response", "gspo"),
    "dapo": Method("DAPO", "is GRPO for long responses", "dapo"),
    "rlhf": Method(
        "SFT, a reward model, PPO", "imitates, learns what is preferred, then optimises that", pipeline="rlhf"
    ),
    "coldstart": Method("SFT, then DAPO", "imitates a little, then improves by itself", pipeline="coldstart"),
    "hybrid": Method(
        "DirectAlignmentPO, GRPO, ValueResponse",
        "is the full pipeline around GRPO: fast first, then fine, then steady",
        pipeline="hybrid",
    ),
    "self_improvement": Method(
        "DirectAlignmentPO, in rounds",
        "samples, judges, and learns from its own pairs",
        pipeline="self_improvement",
    ),
}
"""The leaves of the tree."""


class Unanswered(Exception):
    """A question that was not answered."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.text)
        self.question = question


def decide(answer: Callable[[Question], str | None]) -> tuple[list[tuple[Question, str]], Method]:
    """Walk down the tree.

    Args:
        answer: The answer to a question, by name; ``None`` if there is none.

    Returns:
        The questions that were asked, each with its answer, and the method.

    Raises:
        Unanswered: If there is no answer to a question on the way.
    """
    asked, node = [], "data"
    while node in QUESTIONS:
        question = QUESTIONS[node]
        given = answer(question)
        if given is None:
            raise Unanswered(question)
        asked.append((question, given))
        node = question.answers[given].then
    return asked, METHODS[node]


def describe(asked: Sequence[tuple[Question, str]], method: Method) -> str:
    """The way through the tree with its reasons, and what to run."""
    lines = []
    for question, given in asked:
        answer = question.answers[given]
        lines += [f"{question.text} --{question.flag} {given}: {answer.text}", f"  {answer.why}"]
    lines += ["", f"Recommended: {method.name}. It {method.what}.", "  On the embedded model:", f"    {method.command}"]
    if method.pipeline is not None:
        lines.append(f"  {method.files[0]} says how its stages follow each other; change model and data there.")
    else:
        lines.append(f"  The constants of its source are in {method.files[2]}; give it your model and data:")
        lines.append(
            f"    rlalign fit --config {method.files[0]} --config {method.files[2]} --run mine \\\n"
            "      --model.init_args.policy.model=MODEL --data.init_args.train=FILE --data.init_args.val=null \\\n"
            "      --data.init_args.num_held_out=200"
        )
    return "\n".join(lines)


def ask(question: Question) -> str:
    """Ask on the terminal, until there is an answer."""
    names = list(question.answers)
    print(question.text)
    for number, name in enumerate(names, 1):
        print(f"  {number}. {name}: {question.answers[name].text}")
    while True:
        given = input(f"1-{len(names)}? ").strip()
        if given in names:
            return given
        if given.isdecimal() and 1 <= int(given) <= len(names):
            return names[int(given) - 1]
        print(f"Answer with a number, or one of {', '.join(names)}.")


def flags() -> dict[str, dict[str, str]]:
    """Option -> its answers, each with what it means."""
    found: dict[str, dict[str, str]] = {}
    for question in QUESTIONS.values():
        found.setdefault(question.flag, {}).update({name: a.text for name, a in question.answers.items()})
    return found


def main(argv: Sequence[str]) -> int:
    """Recommend by the options, or by questions where there is somebody to ask."""
    parser = argparse.ArgumentParser(
        prog="rlalign recommend",
        description="Which method to use, why, and how to run it. On a terminal, what no option says is asked.",
        allow_abbrev=False,
    )
    for flag, answers in flags().items():
        text = "; ".join(text if text.startswith(name) else f"{name}: {text}" for name, text in answers.items())
        parser.add_argument(f"--{flag}", choices=list(answers), help=text)
    given = vars(parser.parse_args(argv[1:]))
    can_ask = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        asked, method = decide(lambda q: given[q.flag] or (ask(q) if can_ask else None))
    except Unanswered as missing:
        question = missing.question
        choices = "|".join(question.answers)
        print(
            f"rlalign: error: {question.text} Say so by --{question.flag} {choices}, or answer on a terminal.",
            file=sys.stderr,
        )
        return 2
    except (EOFError, KeyboardInterrupt):
        print()
        return 130
    print(describe(asked, method))
    unused = [flag for flag, value in given.items() if value and flag not in {q.flag for q, _ in asked}]
    if unused:
        print(f"It makes no difference here: {', '.join(f'--{flag}' for flag in unused)}.")
    return 0
