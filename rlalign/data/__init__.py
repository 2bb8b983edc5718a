"""Data that are not rollouts: demonstrations."""
