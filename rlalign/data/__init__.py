"""Data that are not rollouts: demonstrations, preferences, labelled responses."""
