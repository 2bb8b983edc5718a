"""What is worth knowing about the rollouts of an iteration."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from torch import Tensor

from rlalign.rollouts.batch import Rollout


def repetition(token_ids: Tensor, n: int = 4) -> float:
    """Share of the n-grams of a response that occurred before in it; 0 where it is too short to tell."""
    ids = token_ids.tolist()
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def rollout_statistics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Means over all rollouts and shares of their groups, by the names of docs/metrics.md.

    Args:
        rollouts: Everything that was sampled, the samples of a prompt adjacent.
        group_size: Samples a prompt.
    """
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [len(r.token_ids) for r in rollouts]
    groups = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
    seen = [[r.reward for r in group if r.reward is not None] for group in groups]
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
        "rollout/zero_std_share": fmean(len(set(values)) < 2 for values in seen),
        "rollout/all_right_share": fmean(all(r.correct for r in group) for group in groups),
        "rollout/all_wrong_share": fmean(not any(r.correct for r in group) for group in groups),
    }
    for name in rollouts[0].components:
        values = [v for r in rollouts if (v := r.components[name]) is not None]
        statistics[f"rollout/reward/{name}"] = fmean(values) if values else 0.0
        statistics[f"rollout/reward/{name}_std"] = pstdev(values) if values else 0.0
        statistics[f"rollout/reward/{name}_unscored_share"] = 1 - len(values) / len(rollouts)
    return statistics
