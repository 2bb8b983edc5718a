"""Who is handed what, and what becomes of it when workers die: with workers of this process in place of Ray's."""

import importlib.util
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs the extra ray", allow_module_level=True)

from rlalign.rollouts.sampling.base import Completion, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.ray import crew as crew_module
from rlalign.rollouts.sampling.ray.crew import Crew, Item


class Hall:
    """Workers whose answers are given by the test."""

    def __init__(self) -> None:
        self.hired: list[int] = []
        self.given: SimpleQueue = SimpleQueue()

    def hire(self, number: int):
        self.hired.append(number)

        def remote(requests, params, autocast, version):
            answer: Future = Future()
            self.given.put((number, [r.prompt_index for r in requests], version, answer))
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(sample=SimpleNamespace(remote=remote))

    def next(self):
        return self.given.get(timeout=30)


def item(*prompts: int, home: int = 0) -> Item:
    return Item([SampleRequest((1,), prompt, 0, 0) for prompt in prompts], SamplingParams(), None, home)


def done(prompt: int) -> tuple[list[Completion], float, float]:
    return [Completion([prompt], [0.0], "eos")], 0.1, 0.4


@pytest.fixture
def hall(monkeypatch):
    monkeypatch.setattr(crew_module, "_kill", lambda worker: None)
    monkeypatch.setattr(crew_module, "_is_connected", lambda: True)
    return Hall()


@pytest.fixture
def start(hall):
    crews = []

    def make(num_workers: int, max_deaths: int = 3) -> Crew:
        crews.append(Crew(hall.hire, num_workers, max_deaths))
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()


def death(name: str = "ActorDiedError") -> Exception:
    import ray.exceptions

    said = {"OutOfMemoryError": ("low on memory",), "ActorUnavailableError": ("not reached", b"0" * 16)}
    return getattr(ray.exceptions, name)(*said.get(name, ()))


def test_items_go_home_unless_somebody_is_free_and_come_back_in_order(hall, start):
    crew = start(2)
    crew.version = 7
    drawing = crew.submit([item(0, home=0), item(1, home=0), item(2, home=1), item(3, home=0)], urgent=False)
    first, second = sorted((hall.next() for _ in range(2)), key=lambda given: given[0])
    assert (first[:3], second[:3]) == ((0, [0], 7), (1, [2], 7))
    second[3].set_result(done(2))
    number, prompts, _, answer = hall.next()
    assert (number, prompts) == (1, [1]), "what another one has not come to"
    first[3].set_result(done(0))
    assert hall.next()[3].set_result(done(3)) is None
    answer.set_result(done(1))
    assert [completion.token_ids for completion in drawing.result()] == [[0], [1], [2], [3]]
    assert crew.busy_seconds == pytest.approx(2.0)
    assert list(crew.seconds) == [(0.1, 0.4)] * 4


def test_what_is_urgent_comes_first_and_earlier_submissions_before_later_ones(hall, start):
    crew = start(1)
    crew.submit([item(0)], urgent=False)
    running = hall.next()
    crew.submit([item(1)], urgent=False)
    crew.submit([item(2)], urgent=False)
    crew.submit([item(3)], urgent=True)
    running[3].set_result(done(0))
    order = []
    for _ in range(3):
        _, prompts, _, answer = hall.next()
        order += prompts
        answer.set_result(done(prompts[0]))
    assert order == [3, 1, 2]


@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnavailableError", "OutOfMemoryError", "WorkerCrashedError"])
def test_an_item_of_a_dead_worker_is_handed_out_again_in_front_and_counts_once(hall, start, name):
    crew = start(1)
    drawing = crew.submit([item(0), item(1)], urgent=False)
    hall.next()[3].set_exception(death(name))
    number, prompts, _, answer = hall.next()
    assert (number, prompts, hall.hired, crew.num_replaced) == (0, [0], [0, 0], 1)
    answer.set_result(done(0))
    hall.next()[3].set_result(done(1))
    assert len(drawing.result()) == 2


def test_an_answer_of_a_worker_that_was_given_up_does_not_count(hall, start):
    crew = start(1)
    drawing = crew.submit([item(0)], urgent=False)
    _, _, _, late = hall.next()
    old = crew.workers[0]
    crew.lost(0, old, death())
    crew.lost(0, old, death())  # told twice
    assert crew.num_replaced == 1
    _, _, _, answer = hall.next()
    late.set_result(done(8))
    answer.set_result(done(9))
    assert [completion.token_ids for completion in drawing.result()] == [[9]]


def test_a_worker_that_dies_again_and_again_ends_everything(hall, start):
    crew = start(1, max_deaths=2)
    waiting, later = crew.submit([item(0), item(1)], urgent=False), crew.submit([item(2)], urgent=False)
    for _ in range(2):
        hall.next()[3].set_exception(death())
    for drawing in (waiting, later, crew.submit([item(3)], urgent=True)):
        with pytest.raises(RuntimeError, match="Worker 0 of RaySampler died 2 times in a row without a response"):
            drawing.result()
    with pytest.raises(RuntimeError, match="died 2 times"):
        crew.lost(0, crew.workers[0], death())


def test_deaths_with_a_response_between_do_not_add_up(hall, start):
    crew = start(1, max_deaths=2)
    drawing = crew.submit([item(n) for n in range(4)], urgent=False)
    for number in range(4):
        hall.next()[3].set_exception(death())
        hall.next()[3].set_result(done(number))
    assert len(drawing.result()) == 4
    assert crew.num_replaced == 4


def test_what_a_worker_raises_is_raised_where_it_was_asked_for(hall, start):
    crew = start(1)
    drawing, other = crew.submit([item(0)], urgent=False), crew.submit([item(1)], urgent=False)
    hall.next()[3].set_exception(KeyError("bad"))
    hall.next()[3].set_result(done(1))
    with pytest.raises(KeyError):
        drawing.result()
    assert other.result()
    assert crew.num_replaced == 0


def test_what_is_cancelled_is_not_begun_and_what_was_begun_goes_on(hall, start):
    crew = start(1)
    drawing, other = crew.submit([item(0), item(1)], urgent=False), crew.submit([item(2)], urgent=False)
    _, _, _, answer = hall.next()
    drawing.cancel()
    answer.set_result(done(0))
    assert hall.next()[1] == [2]
    with pytest.raises(CancelledError):
        drawing.result()
    crew.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.result()


def test_a_cluster_that_is_gone_is_not_started_again(hall, start, monkeypatch):
    crew = start(1)
    drawing = crew.submit([item(0)], urgent=False)
    monkeypatch.setattr(crew_module, "_is_connected", lambda: False)
    hall.next()[3].set_exception(death())
    with pytest.raises(RuntimeError, match="Ray was shut down"):
        drawing.result()
    assert hall.hired == [0]
