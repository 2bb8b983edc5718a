"""Sampling by workers on a Ray cluster (extra ``ray``): see docs/ray.md."""

from rlalign.rollouts.sampling.ray.sampler import RaySampler

__all__ = ["RaySampler"]
