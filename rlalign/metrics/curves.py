"""What more samples a prompt bring, at equal numbers of generated tokens."""

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlalign.functional.estimators import best_of_n_correct, majority_correct, pass_at_k
from rlalign.metrics.validation import ReadAnswers, sizes_up_to
from rlalign.rollouts.batch import Rollout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES = {
    "pass": ("at least one of n is right (pass@n)", "0.55", "^"),
    "best": ("best of n by the ranker", "C3", "o"),
    "majority": ("majority of n", "C0", "s"),
}
"""Of each curve: its name in the legend, colour and marker."""


def best_of_n_curves(rollouts: Sequence[Rollout], read_answers: ReadAnswers) -> dict[str, Any]:
    """Share of right answers by the number of samples a prompt, exact: the mean over all subsets of so many.

    Args:
        rollouts: Equally many responses to each prompt, those of a prompt adjacent.
        read_answers: What responses answer, for the majority's vote.

    Returns:
        Plain values: ``prompts``, ``samples`` of each, ``n``: the powers of two below that, and it; ``tokens``
        generated a prompt for each ``n``; shares of right answers for each ``n``: ``majority``, ``best`` (the ranker's;
        ``None`` if nothing ranks) and ``pass``; ``plain``: that of one sample; and the shares of the responses that are
        ``truncated``, ``unscored`` (which count as wrong) and ``unranked``.

    Raises:
        ValueError: If there are no rollouts, or prompts have unequally many.
    """
    groups = [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.prompt_index)]
    samples = len(groups[0]) if groups else 0
    if any(len(group) != samples for group in groups) or not samples:
        raise ValueError(f"Expected equally many responses to each prompt, got {sorted({*map(len, groups)})}.")
    right = [[rollout.correct for rollout in group] for group in groups]
    answers = [read_answers([rollout.response for rollout in group]) for group in groups]
    scores = [[rollout.score for rollout in group] for group in groups]
    is_ranked = any(rollout.score is not None for rollout in rollouts)
    length, sizes = fmean(len(rollout.token_ids) for rollout in rollouts), sizes_up_to(samples)
    return {
        "prompts": len(groups),
        "samples": samples,
        "n": sizes,
        "tokens": [n * length for n in sizes],
        "plain": fmean(rollout.correct for rollout in rollouts),
        "majority": [fmean(majority_correct(*pair, n) for pair in zip(answers, right, strict=True)) for n in sizes],
        "best": [fmean(best_of_n_correct(*pair, n) for pair in zip(scores, right, strict=True)) for n in sizes]
        if is_ranked
        else None,
        "pass": [fmean(pass_at_k(samples, sum(group), n) for group in right) for n in sizes],
        "truncated_share": fmean(rollout.truncated for rollout in rollouts),
        "unscored_share": fmean(rollout.reward is None for rollout in rollouts),
        "unranked_share": fmean(rollout.score is None for rollout in rollouts) if is_ranked else None,
    }


def draw_best_of_n(
    curves: dict[str, Any], title: str = "", intervals: dict[str, list[tuple[float, float]]] | None = None
) -> "Figure":
    """Share of right answers against generated tokens.

    Args:
        curves: As :func:`best_of_n_curves` gives them.
        title: Of the figure.
        intervals: Lower and upper ends of a band around the curves ``best`` and ``majority``, for each ``n``.
    """
    from matplotlib.figure import Figure  # no pyplot: the program's own figures and backend are left alone

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    tokens, sizes = curves["tokens"], curves["n"]
    for name, (label, colour, marker) in LINES.items():
        if curves[name] is None:
            continue
        style = "--" if name == "pass" else "-"
        axes.plot(tokens, curves[name], style, label=label, color=colour, marker=marker, markersize=4, linewidth=1.6)
        if intervals and name in intervals:
            low, high = zip(*intervals[name], strict=True)
            axes.fill_between(tokens, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.axhline(curves["plain"], color="black", linestyle=":", linewidth=1.4, label="plain sampling (pass@1)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in tokens])
    axes.minorticks_off()
    bottom, top_end = axes.get_ylim()
    axes.set_ylim(max(bottom, -0.02), min(top_end, 1.02))  # bands of few seeds reach beyond what a share can be
    axes.set_xlabel("generated tokens a prompt")
    axes.set_ylabel("share of right answers")
    top = axes.secondary_xaxis("top")
    top.set_xticks(tokens, [str(n) for n in sizes])
    top.minorticks_off()
    top.set_xlabel("samples a prompt, n")
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure
