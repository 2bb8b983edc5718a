"""What only worker processes import (see :mod:`rlalign.rewards.pool`), and what may hang or misbehave there."""
