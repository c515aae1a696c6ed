"""`python -m resihp` is `resihp`."""

from __future__ import annotations

import sys

from resihp.cli import main

if __name__ == "__main__":
    sys.exit(main())
