"""What the compiler's tests share; their helper modules lie beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# The generator of random plans lies with the tests of the language.
sys.path[:0] = [str(HERE), str(HERE.parent / "ir")]
