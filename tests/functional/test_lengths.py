import pytest
import torch

from rlalign.functional.lengths import overlong_mask, soft_overlong_penalty


def test_soft_overlong_penalty_kf34():
    got = soft_overlong_penalty(torch.tensor([1, 80, 81, 90, 100, 101, 500]), max_tokens=100, cache_tokens=20)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]))


def test_soft_overlong_penalty_matches_the_three_branches_of_the_paper():
    lengths = torch.arange(0, 30)
    expected = []
    for y in lengths.tolist():
        if y <= 20 - 8:
            expected.append(0.0)
        elif y <= 20:
            expected.append(((20 - 8) - y) / 8)
        else:
            expected.append(-1.0)
    torch.testing.assert_close(soft_overlong_penalty(lengths, 20, 8), torch.tensor(expected))


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_soft_overlong_penalty_refuses_a_cache_out_of_bounds(cache):
    with pytest.raises(ValueError, match=f"cache_tokens <= max_tokens, got {cache} and 100"):
        soft_overlong_penalty(torch.tensor([1]), 100, cache)


def test_overlong_mask_empties_the_rows_that_were_cut_off():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1]])
    got = overlong_mask(mask, torch.tensor([False, True, False]))
    assert got.dtype == torch.bool
    assert got.tolist() == [[True, True, False], [False] * 3, [True, False, True]]
    with pytest.raises(ValueError, match=r"got \[3, 3\] and \[2\]"):
        overlong_mask(mask, torch.tensor([True, False]))
