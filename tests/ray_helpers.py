"""What workers of a Ray cluster import in tests."""

import os
from pathlib import Path

import torch

from rlalign.rollouts.sampling.local import LocalSampler


class DiesOnce(LocalSampler):
    """Ends its process when it is to draw one of these prompts, once for each and for each seed of the draws.

    Args:
        folder: Where a file is left for each time.
        prompts: Numbers of the prompts.
        always: Leave no file.
    """

    def __init__(self, folder: str, prompts: list[int], always: bool = False) -> None:
        super().__init__()
        self.folder, self.prompts, self.always = Path(folder), prompts, always

    def sample(self, requests, params):
        for request in requests:
            mark = self.folder / f"{request.prompt_index}-{request.seed}"
            if request.prompt_index in self.prompts and not mark.exists():
                if not self.always:
                    mark.touch()
                os._exit(1)
        return super().sample(requests, params)


class Tells(LocalSampler):
    """Raises what it is told about the worker."""

    def sample(self, requests, params):
        raise ValueError(f"mood {os.environ.get('MOOD')}, threads {torch.get_num_threads()}, items {len(requests)}")
