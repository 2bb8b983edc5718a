"""A guard of the rewards and of what the responses look like."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any, ClassVar

from lightning import LightningModule, Trainer

from rlalign.callbacks.guard import Action, Actions, Check, Guard, as_actions
from rlalign.rollouts.ranks import broadcast_object


class RewardMonitor(Guard):
    """Watches rewards for swings and collapse, groups for signal, and responses for truncation and repetition.

    It reads ``rollout/*``, figures of the policy that an iteration started with; so ``rollback`` goes back to the
    checkpoint before that one, and the checkpoint callback must keep at least two. With ``end_iteration``, the steps
    after the iteration's first are left out. Each check is off where its threshold is ``None``.

    Args:
        swing: A change of ``rollout/reward`` from one iteration to the next of more than this many times the usual one
            (root mean square of the last ``window`` changes) ...
        swing_min: ... and of more than this, in units of the reward, is a swing.
        collapse: ``rollout/reward`` this far below the best mean of ``window`` iterations is a collapse.
        no_signal: At least this share of groups with one reward throughout (``rollout/zero_std_share``).
        truncation: More than this share of responses cut by the length limit (``rollout/truncated_share``).
        repetition: More than this share of repeated 4-grams (``rollout/repetition``).
        window: Iterations that are remembered; there is no swing or collapse before so many were seen.
        swing_action: What to do: see :data:`~rlalign.callbacks.guard.Actions`.
        collapse_action: The same for a collapse.
        no_signal_action: The same for groups without signal.
        truncation_action: The same for truncation.
        repetition_action: The same for repetition.
        patience: Iterations in a row until a check acts (a swing acts at once).
        kwargs: ``lr_factor``, ``kl_factor``, ``max_rollbacks``: see :class:`~rlalign.callbacks.guard.Guard`.

    Raises:
        ValueError: If a number is out of bounds or an action is unknown.
    """

    judges_rollouts: ClassVar[bool] = True

    def __init__(
        self,
        swing: float | None = 4.0,
        swing_min: float = 0.1,
        collapse: float | None = 0.3,
        no_signal: float | None = 1.0,
        truncation: float | None = 0.9,
        repetition: float | None = 0.5,
        window: int = 10,
        swing_action: Actions = "warn",
        collapse_action: Actions = "warn",
        no_signal_action: Actions = "warn",
        truncation_action: Actions = "warn",
        repetition_action: Actions = "warn",
        patience: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        shares = {"no_signal": no_signal, "truncation": truncation, "repetition": repetition}
        for name, value in {"swing": swing, "swing_min": swing_min, "collapse": collapse, **shares}.items():
            if value is not None and not (value >= 0 and (name not in shares or value <= 1)):
                raise ValueError(
                    f"RewardMonitor: {name} must be {'in [0, 1]' if name in shares else '0 or more'}, got {value}."
                )
        if window < 2 or patience < 1:
            raise ValueError(f"RewardMonitor: expected window >= 2 and patience >= 1, got {window} and {patience}.")
        self.swing, self.swing_min, self.collapse = swing, swing_min, collapse
        self.no_signal, self.truncation, self.repetition = no_signal, truncation, repetition
        self.window, self.patience = window, patience
        self.actions: dict[str, tuple[Action, ...]] = {
            name: as_actions(f"RewardMonitor.{name}_action", action)
            for name, action in {
                "swing": swing_action,
                "collapse": collapse_action,
                "no_signal": no_signal_action,
                "truncation": truncation_action,
                "repetition": repetition_action,
            }.items()
        }
        self.rewards: list[float] = []
        """Of the last ``window + 1`` iterations."""
        self.best: float | None = None
        """The best mean of ``window`` iterations."""

    def all_actions(self) -> tuple[Action, ...]:
        """Every action that was asked for."""
        return tuple(action for actions in self.actions.values() for action in actions)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def judge(self, values: Mapping[str, float]) -> list[Check]:
        """All checks that are on and whose metrics are there."""
        checks = [
            *self._judge_reward(values.get("rollout/reward")),
            *self._judge_groups(values),
            *self._judge_share(
                "truncation",
                values.get("rollout/truncated_share"),
                self.truncation,
                "of the responses were cut by the length limit. Length cap too small: raise sampling.max_new_tokens or "
                "add the soft overlong punishment to the rewards.",
            ),
            *self._judge_share(
                "repetition",
                values.get("rollout/repetition"),
                self.repetition,
                "of the 4-grams of a response occurred in it before. The policy repeats itself: raise kl_coef or the "
                "entropy coefficient, lower the rate, and look at samples.jsonl for a reward that can be gamed.",
            ),
        ]
        return checks

    def _judge_reward(self, reward: float | None) -> list[Check]:
        checks: list[Check] = []
        if reward is None:
            return checks
        if self.swing is not None and len(self.rewards) > self.window:
            change = reward - self.rewards[-1]
            changes = [b - a for a, b in zip(self.rewards, self.rewards[1:], strict=False)]
            usual = fmean(c * c for c in changes) ** 0.5
            message = (
                f"rollout/reward swings: a change of {change:+.3g} where {usual:.2g} is usual. Clip the gradient norm "
                "at 1.0 to 2.0 (trainer.gradient_clip_val), take a larger batch, or lower the rate."
            )
            outside = not abs(change) <= max(self.swing * usual, self.swing_min)
            checks.append(Check("swing", outside, message, self.actions["swing"]))
        if self.collapse is not None and self.best is not None:
            message = (
                f"rollout/reward = {reward:.3g} has collapsed from {self.best:.3g}, its best mean over {self.window} "
                "iterations. Go back to an earlier checkpoint, lower the rate, raise kl_coef, or clip at 1.0 to 2.0."
            )
            outside = not reward >= self.best - self.collapse
            checks.append(Check("collapse", outside, message, self.actions["collapse"], self.patience))
        return checks

    def _judge_groups(self, values: Mapping[str, float]) -> list[Check]:
        share = values.get("rollout/zero_std_share")
        if self.no_signal is None or share is None:
            return []
        truncated = values.get("rollout/truncated_share", 0.0)
        if values.get("rollout/all_wrong_share", 0.0) >= self.no_signal:
            why = "all are wrong: take easier prompts, train by demonstrations (SFT) first, or check the reward"
            if truncated > 0.9:
                why = f"{truncated:.0%} of the responses are cut. Length cap too small: raise sampling.max_new_tokens"
        elif values.get("rollout/all_right_share", 0.0) >= self.no_signal:
            why = "all are right: take harder prompts, or stop here"
        else:
            why = "check that the reward tells responses apart, and raise the sampling temperature or the group size"
        message = (
            f"{share:.0%} of the groups have one reward throughout, and there is nothing to learn from them: {why}."
        )
        return [Check("no_signal", share >= self.no_signal, message, self.actions["no_signal"], self.patience)]

    def _judge_share(self, name: str, share: float | None, threshold: float | None, text: str) -> list[Check]:
        if threshold is None or share is None:
            return []
        return [Check(name, share > threshold, f"{share:.0%} {text}", self.actions[name], self.patience)]

    def observe(self, values: Mapping[str, float]) -> None:
        """Remember the reward."""
        reward = values.get("rollout/reward")
        if reward is None:
            return
        self.rewards = [*self.rewards, reward][-self.window - 1 :]
        if len(self.rewards) >= self.window:
            mean = fmean(self.rewards[-self.window :])
            self.best = mean if self.best is None else max(self.best, mean)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The rollouts are known with the first minibatch: leave out the steps after it, where that was asked for."""
        if batch_idx == 0 and "end_iteration" in self.all_actions():
            for check in self.judge(broadcast_object(batch.statistics)):
                due = check.outside and self.streaks.get(check.name, 0) + 1 >= check.patience
                if due and "end_iteration" in check.actions:
                    self.end_iteration(trainer, check.message)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered."""
        return {**super().state_dict(), "rewards": list(self.rewards), "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        super().load_state_dict(state_dict)
        self.rewards, self.best = list(state_dict["rewards"]), state_dict["best"]
