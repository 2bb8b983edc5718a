"""Statistical tests have fixed keys, so each passes always or never; their bounds are 1 in 1000 on each side."""

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy import stats

from rlalign.functional import draws
from rlalign.functional.draws import draw_token, fold_in, hashed_bits, hashed_permutation, hashed_uniform

BEFORE_ONE = 1 - 2.0**-53


def assert_expected(counts, shares):
    """Chi-square: counts fit the shares, and not suspiciously well."""
    total = sum(counts)
    statistic = sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, shares, strict=True))
    low, high = stats.chi2.ppf([0.001, 0.999], len(counts) - 1)
    assert low < statistic < high


def test_one_key_gives_the_published_output_of_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    golden = 0x9E3779B97F4A7C15
    for step, expected in enumerate(published):
        seed = (1234567 + step * golden) % (1 << 64)
        key = seed - (1 << 64) if seed >> 63 else seed
        assert hashed_bits(key).item() % (1 << 64) == expected


@pytest.mark.parametrize("keys", [(0,), (1, 2), (2, 1), (-1, 0, -(1 << 63), (1 << 63) - 1), (5, 5, 5, 5, 5)])
def test_fold_in_is_the_upper_bits_of_the_hash(keys):
    assert fold_in(*keys) == hashed_bits(*keys).item() % (1 << 64) >> 1
    assert fold_in(*keys) == hashed_bits(*(torch.tensor([k]) for k in keys)).item() % (1 << 64) >> 1
    assert 0 <= fold_in(*keys) < 1 << 63


def test_the_order_and_the_number_of_keys_matter():
    keys = [(0,), (0, 0), (0, 0, 0), (1, 2), (2, 1), (1,), (1, 0), (0, 1)]
    assert len({fold_in(*k) for k in keys}) == len(keys)


def test_keys_broadcast_and_a_draw_does_not_depend_on_its_batch():
    rows, positions = torch.arange(5).unsqueeze(1), torch.arange(7)
    whole = hashed_uniform(3, rows, positions)
    assert whole.shape == (5, 7)
    assert whole.dtype == torch.float64
    for r, p in itertools.product(range(5), range(7)):
        assert whole[r, p] == hashed_uniform(3, r, p)
    assert torch.equal(hashed_uniform(3, rows[[4, 1]], positions[2:4]), whole[[4, 1], 2:4])
    assert torch.equal(hashed_uniform(3, rows.int(), positions.to(torch.int16)), whole)


def test_uniforms_are_the_upper_53_bits():
    bits, uniforms = hashed_bits(torch.arange(100)), hashed_uniform(torch.arange(100))
    assert [u * 2**53 for u in uniforms.tolist()] == [b % (1 << 64) >> 11 for b in bits.tolist()]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_uniforms_are_uniform_along_every_key(position):
    keys = [17, 42, 5]
    keys[position] = torch.arange(1 << 16)
    uniforms = hashed_uniform(*keys)
    assert_expected(torch.histc(uniforms, 256, 0, 1).tolist(), [1 / 256] * 256)
    assert stats.kstest(uniforms.numpy(), "uniform").pvalue > 0.001
    low_bits = (hashed_bits(*keys) % 256 + 256) % 256
    assert_expected(low_bits.bincount(minlength=256).tolist(), [1 / 256] * 256)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbouring_keys_are_independent(position, distance):
    keys, neighbours, n = [3, 8, 1], [3, 8, 1], 1 << 15
    keys[position], neighbours[position] = torch.arange(n), torch.arange(n) + distance
    pairs = torch.stack([hashed_uniform(*keys), hashed_uniform(*neighbours)])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 3.3 / math.sqrt(n)
    cells = (pairs * 16).long()
    assert_expected((cells[0] * 16 + cells[1]).bincount(minlength=256).tolist(), [1 / 256] * 256)


@pytest.mark.parametrize("position", [0, 1])
def test_one_bit_of_a_key_changes_half_of_the_bits(position):
    bit = torch.tensor([1 << i for i in range(63)])
    keys = torch.arange(200).unsqueeze(1)
    changed = hashed_bits(keys ^ bit, 9) if position == 0 else hashed_bits(9, keys ^ bit)
    original = hashed_bits(keys, 9) if position == 0 else hashed_bits(9, keys)
    flipped = [bin(x % (1 << 64)).count("1") for x in (changed ^ original).flatten().tolist()]
    assert abs(sum(flipped) / len(flipped) - 32) < 3.3 * 4 / math.sqrt(len(flipped))
    assert min(flipped) > 8


def test_prompts_samples_and_positions_do_not_collide():
    grid = hashed_bits(0, *torch.meshgrid(*(torch.arange(64),) * 3, indexing="ij"))
    assert len(grid.unique()) == 64**3


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_a_permutation_holds_every_index_once(n):
    order = hashed_permutation(n, 1, 2)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(n))
    assert torch.equal(order, hashed_permutation(n, 1, 2))
    assert n < 3 or not torch.equal(order, hashed_permutation(n, 2, 1))


def test_every_order_is_equally_likely():
    counts = Counter(tuple(hashed_permutation(4, 7, i).tolist()) for i in range(12_000))
    assert_expected([counts[order] for order in itertools.permutations(range(4))], [1 / 24] * 24)


@pytest.mark.parametrize("function", [hashed_bits, hashed_uniform, fold_in])
def test_hashes_refuse_bad_keys(function):
    with pytest.raises(TypeError, match=r"Key 1 of a hashed draw must be an integer, got 0.5"):
        function(1, 0.5)
    with pytest.raises(ValueError, match="at least one key"):
        function()
    for key in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(ValueError, match=r"Key 0 .* must fit into 64 bits"):
            function(key)
    with pytest.raises(TypeError, match=r"Key 0 of a hashed draw must"):
        function(torch.tensor([1.0]))


def test_a_seed_is_not_made_of_tensors():
    with pytest.raises(TypeError, match=r"must be an integer, got tensor\(3\)"):
        fold_in(torch.tensor(3))


def draw_in_integers(probs, uniform):
    """The definition, in exact Python integers."""
    units = [int(p * (1 << 40)) for p in probs]
    target = min(math.floor(uniform * sum(units)), sum(units) - 1)
    return next(i for i, end in enumerate(itertools.accumulate(units)) if end > target)


@pytest.mark.parametrize("size", [1, 2, 7, 127, 128, 129, 256, 1000])
def test_draw_matches_the_exact_definition(size):
    probs = torch.randn(40, size, generator=torch.Generator().manual_seed(size)).mul(3).softmax(-1)
    probs[::3, : size // 2] = 0
    uniforms = hashed_uniform(size, torch.arange(40))
    uniforms[0], uniforms[1] = 0.0, BEFORE_ONE
    expected = [draw_in_integers(p, u) for p, u in zip(probs.tolist(), uniforms.tolist(), strict=True)]
    assert draw_token(probs, uniforms).tolist() == expected


def test_draws_fit_the_distribution():
    shares = [0.5, 0.2, 0.15, 0.1, 0.04, 0.01]
    probs = torch.zeros(300)
    tokens = [3, 127, 128, 200, 255, 299]
    probs[tokens] = torch.tensor(shares)
    got = draw_token(probs.expand(40_000, -1), hashed_uniform(11, torch.arange(40_000)))
    counts = got.bincount(minlength=300)
    assert counts.sum() == counts[tokens].sum()
    assert_expected(counts[tokens].tolist(), shares)


def test_chi_square_catches_a_wrong_distribution():
    probs = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.04, 0.01]])
    got = draw_token(probs.expand(40_000, -1).sqrt(), hashed_uniform(11, torch.arange(40_000)))
    with pytest.raises(AssertionError):
        assert_expected(got.bincount(minlength=6).tolist(), probs[0].tolist())


def test_a_draw_does_not_depend_on_its_batch(monkeypatch):
    probs = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    uniforms = hashed_uniform(5, torch.arange(9))
    whole = draw_token(probs, uniforms)
    assert [draw_token(probs[i : i + 1], uniforms[i : i + 1]).item() for i in range(9)] == whole.tolist()
    for block in (1, 10_000, 1 << 30):
        monkeypatch.setattr(draws, "_CPU_BLOCK", block)
        assert torch.equal(draw_token(probs, uniforms), whole)
    order = torch.tensor([8, 0, 3])
    assert torch.equal(draw_token(probs[order], uniforms[order]), whole[order])


def test_a_token_below_the_unit_is_never_drawn():
    probs = torch.tensor([[0.0, 5e-13, 0.5, 0.0, 0.5, 8e-13, 0.0]])
    got = draw_token(probs.expand(3, -1), torch.tensor([0.0, 0.5, BEFORE_ONE], dtype=torch.float64))
    assert got.tolist() == [2, 4, 4]
    one_unit = torch.tensor([[0.0, 1e-12, 0.0]])
    assert draw_token(one_unit, torch.tensor([0.5], dtype=torch.float64)).tolist() == [1]


def test_a_uniform_just_below_one_stays_inside():
    """The product with the total of the units is at most half a step of a double below the total, and not a tie."""
    for total in [1, 3, 2**40 - 1, 2**40, 2**40 + 1, 2**41 - 1, 3 * 2**40 + 7]:
        assert int(BEFORE_ONE * total) == total - 1


@pytest.mark.parametrize("total", [0.25, 1 - 1e-6, 1 + 1e-6, 3.7])
def test_probabilities_need_not_sum_to_one(total):
    probs = torch.tensor([0.0, 0.25, 0.25, 0.5]) * total
    uniforms = torch.tensor([0, 0.2499, 0.2501, 0.4999, 0.5001, BEFORE_ONE], dtype=torch.float64)
    assert draw_token(probs.expand(6, -1), uniforms).tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("size", [3, 128, 200])
@pytest.mark.parametrize("value", [0.0, 1e-13, math.nan])
def test_a_row_without_a_usable_probability_is_minus_one(size, value):
    probs = torch.full((2, size), value)
    probs[1] = 0
    probs[1, size - 1] = 1
    got = draw_token(probs, torch.tensor([0.3, 0.3], dtype=torch.float64))
    assert got.tolist() == [-1, size - 1]


def test_no_rows_give_no_tokens():
    for size in (3, 300):
        assert draw_token(torch.zeros(0, size), torch.zeros(0, dtype=torch.float64)).tolist() == []


def test_draw_refuses_bad_input():
    with pytest.raises(ValueError, match=r"got \[2, 3\] and \[3\]"):
        draw_token(torch.ones(2, 3), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got \[2, 0\] and \[2\]"):
        draw_token(torch.ones(2, 0), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"uniforms in float64, got torch\.float32 and torch\.float32"):
        draw_token(torch.ones(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"probs in float32 .*, got torch\.float16"):
        draw_token(torch.ones(2, 3).half(), torch.zeros(2, dtype=torch.float64))
