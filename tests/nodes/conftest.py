"""The helper modules of the tests with several nodes lie beside them, and those of real jobs."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "e2e"):
    sys.path.insert(0, str(folder))
