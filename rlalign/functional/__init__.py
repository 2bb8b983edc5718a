"""The maths: pure functions of tensors that depend on torch alone."""
