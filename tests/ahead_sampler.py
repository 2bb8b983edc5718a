"""A sampler that works ahead, in this process."""

from rlalign.rollouts.sampling.local import LocalSampler


class Drawn:
    def __init__(self, completions, events, number):
        self.completions, self.events, self.number = completions, events, number

    def result(self):
        self.events.append(("take", self.number))
        return self.completions

    def cancel(self):
        self.events.append(("cancel", self.number))


class AheadInProcess(LocalSampler):
    """Draws at once what is submitted, by the weights of then."""

    num_workers, num_replaced, busy_seconds, broadcast_seconds = 1, 0, 0.0, 0.0

    def __init__(self, staleness: int) -> None:
        super().__init__()
        self.staleness, self.version, self.submitted = staleness, 0, 0
        self.events: list[tuple[str, int]] = []

    def is_approximate(self, dtype):
        return self.staleness > 0

    def sync(self, policy):
        super().sync(policy)
        self.version += 1

    def submit(self, requests, params):
        self.submitted += 1
        self.events.append(("ask", self.submitted))
        drawn = super().sample(requests, params)
        for completion in drawn:
            completion.version = self.version
        return Drawn(drawn, self.events, self.submitted)
