"""What is worth knowing about the rollouts of an iteration."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from torch import Tensor

from rlalign.rewards.composition import Composition
from rlalign.rewards.suite import Tally
from rlalign.rollouts.batch import Rollout
from rlalign.rollouts.scoring import components_of


def repetition(token_ids: Tensor, n: int = 4) -> float:
    """Share of the n-grams of a response that occurred before in it; 0 where it is too short to tell."""
    ids = token_ids.tolist()
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def rollout_statistics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Means over all rollouts and shares of their groups, by the names of docs/metrics.md.

    A group is informative if its rewards differ: without a difference there is no advantage.

    Args:
        rollouts: Everything that was sampled, the samples of a prompt adjacent.
        group_size: Samples a prompt.
    """
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [len(r.token_ids) for r in rollouts]
    groups = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
    informative = [len({r.reward for r in group if r.reward is not None}) > 1 for group in groups]
    statistics = {
        "rollout/reward": fmean(rewards) if rewards else 0.0,
        "rollout/reward_std": pstdev(rewards) if rewards else 0.0,
        "rollout/pass@1": fmean(r.correct for r in rollouts),
        "rollout/unscored_share": 1 - len(rewards) / len(rollouts),
        "rollout/length_mean": fmean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/truncated_share": fmean(r.truncated for r in rollouts),
        "rollout/repetition": fmean(repetition(r.token_ids) for r in rollouts),
        "rollout/unavailable_share": fmean(r.unavailable for r in rollouts),
        "rollout/all_right_share": fmean(all(r.correct for r in group) for group in groups),
        "rollout/all_wrong_share": fmean(not any(r.correct for r in group) for group in groups),
    }
    if group_size > 1:  # one response differs from no other
        statistics |= {
            "rollout/zero_std_share": fmean(not has_signal for has_signal in informative),
            "rollout/mixed_share": fmean(len({r.correct for r in group}) > 1 for group in groups),
            "rollout/tokens_per_informative_group": sum(lengths) / max(sum(informative), 1),
        }
    for name in rollouts[0].components:
        values = [v for r in rollouts if (v := r.components[name]) is not None]
        statistics[f"rollout/reward/{name}"] = fmean(values) if values else 0.0
        statistics[f"rollout/reward/{name}_std"] = pstdev(values) if values else 0.0
        statistics[f"rollout/reward/{name}_unscored_share"] = 1 - len(values) / len(rollouts)
    return statistics


def composition_statistics(rollouts: Sequence[Rollout], composition: Composition) -> dict[str, float]:
    """What gates and ranges did; and, where totals are normalised, their mean and deviation before that.

    Args:
        rollouts: Everything that was sampled.
        composition: How its rewards make up a total.
    """
    components = components_of(rollouts)
    statistics = {f"rollout/reward/{name}": share for name, share in composition.shares(components).items()}
    if composition.normalization:  # after which the mean is 0 by construction
        totals = [total for total in composition.totals(components) if total is not None]
        statistics["rollout/reward"] = fmean(totals) if totals else 0.0
        statistics["rollout/reward_std"] = pstdev(totals) if totals else 0.0
    return statistics


def scoring_statistics(tallies: Sequence[Tally]) -> dict[str, float]:
    """The time of each reward on the slowest rank, and what rewards counted, on all ranks together.

    Args:
        tallies: One a rank.
    """
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for tally in tallies:
        for name, value in tally.seconds.items():
            seconds[name] = max(seconds.get(name, 0.0), value)
        counts.update(tally.counts)
    return {f"perf/reward_seconds/{name}": value for name, value in seconds.items()} | {
        f"rollout/reward/{name}": float(count) for name, count in counts.items()
    }


def pass_rates(rollouts: Sequence[Rollout], correct: str) -> dict[int, float]:
    """Prompt -> share of right responses among those that could be scored; without the prompts that have none.

    Args:
        rollouts: Everything that was sampled.
        correct: Name of the reward that tells right from wrong.
    """
    right: dict[int, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.components[correct] is not None:
            right[rollout.prompt_index].append(rollout.correct)
    return {prompt: fmean(of_prompt) for prompt, of_prompt in right.items()}
