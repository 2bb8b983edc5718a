"""What fits where: the memory of a run, worked out from the shape of a model before anything is loaded."""
