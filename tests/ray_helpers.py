"""What workers of a Ray cluster import in tests."""

import os
from pathlib import Path

from rlalign.rollouts.sampling.local import LocalSampler


class DiesOnce(LocalSampler):
    """Ends its process when it is to draw a prompt whose number has no file yet.

    Args:
        folder: Where a file is left for each prompt that it has died of.
        prompts: Numbers of the prompts.
        forever: Leave no file.
    """

    def __init__(self, folder: str, prompts: list[int], forever: bool = False) -> None:
        super().__init__()
        self.folder, self.prompts, self.forever = Path(folder), prompts, forever

    def sample(self, requests, params):
        for request in requests:
            mark = self.folder / f"{request.prompt_index}-{request.seed}"
            if request.prompt_index in self.prompts and not mark.exists():
                if not self.forever:
                    mark.touch()
                os._exit(1)
        return super().sample(requests, params)


class Refuses(LocalSampler):
    """Raises."""

    def sample(self, requests, params):
        raise ValueError("no such luck")


class Slow(LocalSampler):
    """Waits, before it draws a prompt, until a file is there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def sample(self, requests, params):
        import select

        with (self.folder / "gate").open() as gate:  # a pipe: opens when somebody writes
            select.select([gate], [], [])
        return super().sample(requests, params)
