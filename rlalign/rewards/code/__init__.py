"""Rewards for code, which is run in a sandbox."""

from rlalign.rewards.code.reward import CodeReward

__all__ = ["CodeReward"]
