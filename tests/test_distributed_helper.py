"""What the tests' own ranks say when they fail."""

import os
import threading

import pytest

from distributed import run_distributed


def fails_on_one(rank):
    if rank == 1:
        raise KeyError("the reason")
    threading.Event().wait()


def hangs(rank):
    threading.Event().wait()


def dies(rank):
    os._exit(3)


def test_the_traceback_of_a_rank_comes_through():
    with pytest.raises(RuntimeError, match=r"(?s)Rank 1 failed:.*fails_on_one.*KeyError: 'the reason'"):
        run_distributed(fails_on_one)


def test_a_rank_that_hangs_is_given_up():
    with pytest.raises(TimeoutError, match=r"still running after 0\.5 s"):
        run_distributed(hangs, timeout=0.5)


def test_a_rank_that_dies_is_told():
    with pytest.raises(RuntimeError, match="died without a traceback"):
        run_distributed(dies)


def test_values_come_in_the_order_of_ranks():
    assert run_distributed(lambda rank: rank * 2, world=3) == [0, 2, 4]
