"""The helper modules of the plan language's tests lie beside them, and the fleet beside those."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fleet")]
