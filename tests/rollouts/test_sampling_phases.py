"""When the sampler takes over the policy's weights, and when it lets them go."""

import pytest

from rlalign.rollouts.sampling.local import LocalSampler
from runs import make_run


class Watched(LocalSampler):
    def __init__(self, **options):
        super().__init__(**options)
        self.events = []

    def sync(self, policy):
        self.events.append("sync")
        super().sync(policy)

    def sample(self, requests, params):
        self.events.append("sample")
        return super().sample(requests, params)

    def release(self):
        self.events.append("release")
        super().release()


def phases(events: list[str]) -> list[str]:
    """Events, of several samples in a row the first."""
    return [event for n, event in enumerate(events) if event != "sample" or events[n - 1] != "sample"]


def test_weights_are_copied_once_an_iteration_and_a_validation_and_not_held_while_learning(tiny_model, prompts_file):
    sampler = Watched()
    options = {"sampler": sampler, "num_held_out": 3, "val_batch_size": 1}
    trainer = {"max_epochs": 2, "check_val_every_n_epoch": 1}
    module, data, trainer = make_run(tiny_model, prompts_file, trainer=trainer, **options)
    held = []
    step = module.training_step
    module.training_step = lambda *a: (held.append(sampler._decoder), step(*a))[1]
    trainer.fit(module, data)
    one = ["sync", "sample", "release"]
    assert phases(sampler.events) == one * 4
    assert sampler.events.count("sample") == 2 * (1 + 3)
    assert held == [None] * len(held)
    assert len(held) == 2


def test_an_iteration_that_fails_lets_go_of_the_weights(tiny_model, prompts_file):
    def fails(example, response):
        raise KeyboardInterrupt

    sampler = Watched()
    module, data, trainer = make_run(tiny_model, prompts_file, sampler=sampler, rewards={"r": fails})
    with pytest.raises(SystemExit):
        trainer.fit(module, data)
    assert sampler.events[-1] == "release"


@pytest.mark.parametrize(("options", "warns"), [({}, True), ({"importance_cap": 2.0}, False)])
def test_who_samples_from_something_else_than_the_policy_is_told_to_correct_for_it(
    tiny_model, prompts_file, options, warns, recwarn
):
    sampler = LocalSampler(dtype="bfloat16")
    module, data, trainer = make_run(tiny_model, prompts_file, sampler=sampler, **options)
    trainer.fit(module, data)
    told = [w for w in recwarn if "draws from what differs from the policy" in str(w.message)]
    assert len(told) == warns
