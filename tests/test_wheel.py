"""The wheel: what users install holds what the source tree holds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PLAN = """\
plan 1
model tiny layers=2 hidden=32 heads=4 kv_heads=2 ffn=64 vocab=272
mesh tp=1 pp=1 dp=1
batch microbatches=1 tokens=16

group dp0.pp0 ranks=0 layers=0..1

stream dp=0 pp=0 {
  F 0
  BW 0
  reduce_grads
  step
}
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A freshly built wheel, unpacked into a directory of its own."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
        timeout=50,
    )
    (wheel,) = out.glob("resihp-*.whl")
    target = out / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_the_wheel_has_every_file_of_the_package(unpacked):
    """Grammars, the typing marker and all modules ship; caches and tests do not."""
    source = ROOT / "resihp"
    expected = {
        p.relative_to(ROOT)
        for p in source.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    shipped = {p.relative_to(unpacked) for p in unpacked.rglob("*") if p.is_file()}
    assert {p for p in shipped if p.parts[0] == "resihp"} == expected
    assert Path("resihp/py.typed") in shipped
    assert any(p.suffix == ".lark" for p in shipped)
    assert {p.parts[0].partition("-")[0] for p in shipped} == {"resihp"}


def test_the_wheel_parses_a_plan_far_from_the_source_tree(unpacked):
    """The installed package is enough to read and write plans."""
    code = (
        "import sys, resihp\n"
        "assert resihp.__file__.startswith(sys.argv[1]), resihp.__file__\n"
        "text = sys.stdin.read()\n"
        "plan = resihp.parse(text).plan\n"
        "assert resihp.print_plan(plan) == text\n"
        "print(plan.model.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(unpacked)],
        input=PLAN,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        cwd=unpacked,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "tiny\n", "")
