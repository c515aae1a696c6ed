"""Options of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A busy machine makes any example slow; the suite has a limit of time of its own.
settings.register_profile("any machine", deadline=None)
# `make fuzz`: as many examples as fit ten minutes or so, where a test does not say how many.
settings.register_profile("long", deadline=None, max_examples=20_000)
settings.load_profile("any machine")


def pytest_addoption(parser):
    """`--update-golden` rewrites the texts that golden tests compare with."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the program prints now into tests/ir/golden; look at the diff before "
        "committing it",
    )
