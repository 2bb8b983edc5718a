import itertools

import numpy as np
import pytest
import torch

from rlalign.rollouts.cutting import Cutter, Shapes


def cost(shapes: Shapes, part: np.ndarray) -> int:
    """Tokens that items take together."""
    if not len(part):
        return 0
    rows = torch.from_numpy(part)
    if shapes.prompts is None:
        return len(part) * int(shapes.lengths[rows].max())
    prompts = dict(zip(shapes.prompts[rows].tolist(), shapes.prompt_lengths[rows].tolist(), strict=True))
    return int(shapes.lengths[rows].sum()) + sum(prompts.values())


def draw(seed: int, rows: int, with_prompts: bool) -> Shapes:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (rows,), generator=generator)
    if not with_prompts:
        return Shapes(lengths)
    prompts = torch.arange(rows) // 4
    return Shapes(lengths, prompts, torch.randint(1, 60, (rows,), generator=generator)[prompts])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_prompts", [True, False])
@pytest.mark.parametrize(("num_ranks", "parts"), [(1, 1), (1, 4), (2, 3), (3, 2)])
@pytest.mark.parametrize("together", [1, 2])
def test_every_item_is_in_one_minibatch_and_units_stay_whole(seed, with_prompts, num_ranks, parts, together):
    shapes = draw(seed, 24, with_prompts)
    units = np.random.default_rng(seed).permutation(24 // together)[:, None] * together + np.arange(together)
    cut = Cutter(shapes)(units, parts, num_ranks)
    assert [len(rank) for rank in cut] == [parts] * num_ranks
    every = np.concatenate([part for rank in cut for part in rank])
    assert sorted(every) == list(range(24))
    for part in itertools.chain.from_iterable(cut):
        assert part.tolist() == [i + j for i in part[::together] for j in range(together)]


def test_the_order_of_the_items_decides_nothing_but_ties():
    shapes = Shapes(torch.tensor([5, 1, 4, 2, 8, 3]))
    cuts = [Cutter(shapes)(np.array(order)[:, None], 2, 1)[0] for order in ([0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 3, 1])]
    assert [part.tolist() for part in cuts[0]] == [part.tolist() for part in cuts[1]]


@pytest.mark.parametrize("seed", range(8))
def test_the_costliest_minibatch_costs_as_little_as_adjacent_ones_can(seed):
    shapes = draw(seed, 9, False)
    cut = Cutter(shapes)(np.arange(9)[:, None], 3, 1)[0]
    order = shapes.lengths.argsort(stable=True).numpy()
    ways = (np.split(order, [a, b]) for a in range(10) for b in range(a, 10))
    best = min(max(cost(shapes, part) for part in way) for way in ways)
    assert max(cost(shapes, part) for part in cut) == best


def test_a_long_tail_is_computed_apart():
    lengths = torch.tensor([64] * 29 + [512] * 3)
    cut = Cutter(Shapes(lengths))(np.arange(32)[:, None], 4, 1)[0]
    assert all(len(lengths[torch.from_numpy(part)].unique()) == 1 for part in cut)
    even = [np.arange(n, n + 8) for n in range(0, 32, 8)]
    assert sum(cost(Shapes(lengths), p) for p in cut) < 0.65 * sum(cost(Shapes(lengths), p) for p in even)


def test_equal_prompts_are_kept_together_unless_a_rank_would_wait():
    lengths, prompts = torch.tensor([10, 20, 30, 40] * 4), torch.arange(16) // 4
    cut = Cutter(Shapes(lengths, prompts, torch.full((16,), 30)))(np.arange(16)[:, None], 4, 1)[0]
    assert all(len(prompts[torch.from_numpy(part)].unique()) == 1 for part in cut)
    one = Shapes(lengths, torch.zeros(16, dtype=torch.long), torch.full((16,), 30))
    cuts = Cutter(one)(np.arange(16)[:, None], 1, 2)
    assert [len(part) for (part,) in cuts] == [8, 8]


def test_ranks_agree_on_who_has_what():
    """Which order is better is decided for all ranks at once: else an item would be had twice, or by nobody."""
    lengths = torch.tensor([1, 1, 1, 50, 50, 50, 2, 2])
    shapes = Shapes(lengths, torch.tensor([0, 1, 0, 1, 0, 1, 2, 2]), torch.tensor([9, 30, 9, 30, 9, 30, 4, 4]))
    cut = Cutter(shapes)(np.arange(8)[:, None], 1, 2)
    assert sorted(np.concatenate([part for rank in cut for part in rank])) == list(range(8))


def test_fewer_items_than_minibatches_leave_some_empty():
    cut = Cutter(Shapes(torch.tensor([3, 5])))(np.arange(2)[:, None], 4, 2)
    assert [sum(map(len, rank)) for rank in cut] == [1, 1]
    assert all(len(rank) == 4 for rank in cut)
