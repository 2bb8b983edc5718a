"""Imports everything that a configuration may name by its short name."""

import pkgutil
from importlib import import_module

import rlalign.algorithms
import rlalign.callbacks
import rlalign.data
import rlalign.rewards
import rlalign.rollouts.datamodule
import rlalign.rollouts.sampling

for _package in (rlalign.algorithms, rlalign.callbacks, rlalign.data, rlalign.rewards, rlalign.rollouts.sampling):
    for _module in pkgutil.iter_modules(_package.__path__, _package.__name__ + "."):
        import_module(_module.name)
