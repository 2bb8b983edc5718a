import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "seeds.py"


@pytest.fixture(scope="module")
def seeds():
    spec = importlib.util.spec_from_file_location("seeds", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (30, 2.0423)])
def test_t_quantile_is_that_of_the_tables(seeds, degrees, quantile):
    assert seeds.t_quantile(degrees) == pytest.approx(quantile, abs=2e-3)


def test_t_interval(seeds):
    low, high = seeds.t_interval([0.90, 0.92, 0.94, 0.96, 0.98])
    half = 2.7764 * 0.0316228 / 5**0.5
    assert (low, high) == pytest.approx((0.94 - half, 0.94 + half), abs=1e-4)
