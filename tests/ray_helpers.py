"""What workers of a Ray cluster import in tests."""

import os
from pathlib import Path

import torch

from rlalign.rollouts.sampling.local import LocalSampler


class Obliging(LocalSampler):
    """Does what files of a folder ask it to, once, and draws.

    Args:
        folder: ``die-3`` there ends the process that is to draw prompt 3;
            ``tell-12`` has the one that is to draw 12 rows raise what it is like.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def sample(self, requests, params):
        for name in (f"die-{request.prompt_index}" for request in requests):
            if (self.folder / name).exists():
                (self.folder / name).unlink()
                os._exit(1)
        tell = self.folder / f"tell-{len(requests)}"
        if tell.exists():
            tell.unlink()
            raise ValueError(f"mood {os.environ.get('MOOD')}, threads {torch.get_num_threads()}, rows {len(requests)}")
        return super().sample(requests, params)
