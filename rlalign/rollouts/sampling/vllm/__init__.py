"""Sampling by vLLM (extra ``vllm``): its engine in this process, or a server of it; see docs/vllm.md."""

from rlalign.rollouts.sampling.vllm.engine import VLLMSampler
from rlalign.rollouts.sampling.vllm.server import VLLMServerSampler

__all__ = ["VLLMSampler", "VLLMServerSampler"]
