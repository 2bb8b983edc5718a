"""Rewards of code in every tier that works here."""

import sys

import pytest

from rlalign.rewards.code import CodeReward


def working_tiers():
    """Tiers that a reward can be made for; on Linux, no machine is without one."""
    if sys.platform != "linux":
        return [3]
    tiers = []
    for tier in (1, 2):
        try:
            CodeReward(tier=tier, workers=1).close()
        except RuntimeError:
            continue
        tiers.append(tier)
    return tiers


TIERS = working_tiers()


@pytest.fixture(scope="session", params=TIERS or ["none"])
def tier(request):
    if request.param == "none":
        pytest.fail("Neither tier 1 nor tier 2 works on this machine.")
    return request.param


@pytest.fixture(scope="session")
def make_reward(tier):
    """Rewards in one tier; one worker is enough here."""
    made = []

    def make(**options):
        made.append(CodeReward(**{"tier": tier, "workers": 1, "allow_unsafe": tier == 3, "timeout": 20.0} | options))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


@pytest.fixture(scope="session")
def reward(make_reward):
    """With so much time that an honest answer has enough on a busy machine."""
    return make_reward()


@pytest.fixture(scope="session")
def hasty_reward(make_reward):
    """For answers that are meant to hang."""
    return make_reward(timeout=0.5)
