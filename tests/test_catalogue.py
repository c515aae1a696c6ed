"""The catalogue of faults has a test or a reason for each entry, and tests name only entries."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import ENTRIES, by_entry, marked


def test_every_entry_has_a_test_or_a_reason():
    """Nothing of the catalogue is forgotten."""
    found = by_entry()
    missing = [name for name, entry in ENTRIES.items() if not (found.get(name) or entry.left_out)]
    assert missing == []


def test_tests_name_only_entries():
    """A mark that means nothing is a mistake."""
    assert {mark for mark, _ in marked()} <= ENTRIES.keys()


def test_the_catalogue_is_complete():
    """T1 to T34 and S1 to S8."""
    assert list(ENTRIES) == [f"T{n}" for n in range(1, 35)] + [f"S{n}" for n in range(1, 9)]


def test_marks_are_read_off_docstrings(tmp_path: Path):
    """Of tests, sync or not, in classes or not; not off comments and other strings."""
    path = tmp_path / "deep" / "test_some.py"
    path.parent.mkdir()
    path.write_text(
        'def test_one():\n    """[T1] [T2] Both."""\n'
        'class Both:\n    async def test_two(self):\n        """Also [S3]."""\n'
        'def test_three():\n    """None."""\n    x = "[T4]"  # [T5]\n'
    )
    assert list(marked(tmp_path)) == [
        ("T1", "deep/test_some.py::test_one"),
        ("T2", "deep/test_some.py::test_one"),
        ("S3", "deep/test_some.py::test_two"),
    ]
