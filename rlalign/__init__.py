"""Align language models with reinforcement learning, and understand what happens."""

__version__ = "0.1.0"
