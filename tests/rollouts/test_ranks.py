import os

import torch
import torch.distributed as dist

from distributed import run_distributed
from rlalign.rollouts.ranks import broadcast_object, gather_objects, sum_over_ranks


def exchange(rank: int):
    dist.init_process_group("gloo")
    mine = torch.full((1 if rank == 0 else 4, 3), float(rank))
    gathered = torch.cat(gather_objects(mine))
    correct, count = (torch.tensor(3.0), torch.tensor(12.0)) if rank == 0 else (torch.tensor(3.0), torch.tensor(4.0))
    share = sum_over_ranks(correct) / sum_over_ranks(count)
    return tuple(gathered.shape), gathered[:, 0].tolist(), float(share), float(correct), broadcast_object(f"of {rank}")


def test_unequal_shares_are_gathered_and_summed_kf85_kf86():
    for shape, values, share, correct, word in run_distributed(exchange):
        assert shape == (5, 3)
        assert values == [0, 1, 1, 1, 1]
        assert share == 0.375, "3 of 12 and 3 of 4 are not the mean of 0.25 and 0.75"
        assert correct == 3, "the argument is left as it was"
        assert word == "of 0"


def test_one_process_is_alone():
    assert gather_objects("x") == ["x"]
    assert sum_over_ranks(torch.tensor(2.0)) == 2
    assert broadcast_object("x") == "x"


def seeds(rank: int, model: str, prompts: str):
    from runs import make_run, weights

    module, data, trainer = make_run(model, prompts, policy={"lora_rank": 2}, trainer={"devices": 2, "strategy": "ddp"})
    os.environ.pop("PL_GLOBAL_SEED")
    torch.manual_seed(rank + 100)  # as if nobody had called seed_everything
    trainer.fit(module, data)
    return data.seed, weights(module).sum().item()


def test_without_a_seed_ranks_still_agree(tiny_model, prompts_file):
    first, second = run_distributed(seeds, tiny_model, prompts_file)
    assert first == second
    assert first[0] == 100
