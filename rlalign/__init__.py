"""Align language models with reinforcement learning, and understand what happens."""

import logging

__version__ = "0.1.0"

# bitsandbytes, which peft imports where it is there, tells of a kernel for CPUs that no registry of packages has.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))
