"""The policy, and how it scores tokens."""
