"""What the study of remote workers makes of its runs."""

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def study():
    sys.path.insert(0, str(SCRIPTS))
    import ray_study

    yield ray_study
    sys.path.remove(str(SCRIPTS))


def run_of(study, score: float, weight: float, staleness: list[float]):
    from ray_runs import Watch

    return study.Run(score, torch.tensor([weight]), Watch(staleness=staleness))


def test_rows_pair_the_seeds_and_compare_weights_to_the_bit(study):
    none = [run_of(study, 0.5, 1.0, [0, 0]), run_of(study, 0.7, 2.0, [0, 0])]
    other = [run_of(study, 0.6, 1.0, [0, 1.0, 3.0]), run_of(study, 0.6, 2.5, [0, 2.0, 2.0])]
    rows, lines = study.learning_rows({"none": none, "bounded 4": other})
    assert "| +0.000 | 0.00, 0.00 | the same to the bit |" in rows[0]
    assert "| +0.000 [-1.271, +1.271] | 2.00, 3.00 | others |" in rows[1]
    assert lines[1].startswith("learning bounded 4: 0.600 difference +0.000 [-1.271, +1.271] staleness 2.00")


def test_a_page_keeps_what_is_around_the_marks(study):
    start, end = study.MARKS
    page = f"# Title\n{start}\nold\n{end}\nafter\n"
    assert study.between_marks(page, "new") == f"# Title\n{start}\nnew\n{end}\nafter\n"
    assert all(mark in study.PAGE.read_text() for mark in study.MARKS)


def test_an_iteration_is_timed_without_the_first_ones(study):
    from ray_runs import Watch

    watch = Watch(started=[0, 10, 12, 14], ended=[9, 11, 13, 16], collected=[5, 0.5, 0.25, 1.5])
    assert watch.seconds(skip=2) == 2.0
    assert watch.learned == [4, 0.5, 0.75, 0.5]
