"""``python -m rlalign.cli``: the command, where its script is not on the path."""

import sys

from rlalign.cli import main

sys.exit(main())
