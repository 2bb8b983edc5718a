"""How responses are drawn."""
