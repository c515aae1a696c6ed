"""`docs/plan-language.md` says what the code does: its plans are right, its commands are run.

A block named like a file (```` ```plan small.plan ````) is that file. Commands run in the order of
the page in a folder with all these files; what is shown below a command is what it prints (`...`:
and more). `pytest tests/ir/test_docs.py --update-golden` writes what it prints now.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import fields

from resihp.cli import VERBS, main
from resihp.config.schema import Injection, JobConfig
from resihp.ir.codes import CODES
from resihp.ir.explanation import file_of
from resihp.ir.levels import SOURCE_WORDS, STATEMENT_WORDS
from resihp.ir.model import Op
from resihp.ir.parser import parse
from resihp.ir.placement import placement_of
from resihp.ir.printer import format_text
from resihp.ir.verify import verify

FILE = Path(__file__).parents[2] / "docs" / "plan-language.md"
EXAMPLE = FILE.parents[1] / "examples" / "stdlib.toml"
PAGE = FILE.read_text(encoding="utf-8")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILES = {info.split()[1]: text for info, text in BLOCK.findall(PAGE) if " " in info}
MORE = "..."
SNIPPET_HEAD = """plan 1
model tiny layers=8 hidden=64 heads=8 kv_heads=4 ffn=96 vocab=128
mesh tp=1 pp=3 dp=1
batch microbatches=1 tokens=16
"""


class Shown(NamedTuple):
    """A command of the page with what stands below it."""

    command: str
    output: list[str]


def shown_in(block: str) -> Iterator[Shown]:
    """The commands of a block; none for one that shows something else."""
    if block.startswith("$ "):
        for part in block.split("\n$ "):
            command, *output = part.removeprefix("$ ").rstrip("\n").split("\n")
            yield Shown(command, output)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, capsys) -> tuple[int, list[str]]:
    """Exit status and output of `resihp …`, with `| tail -n N`, `> FILE` and `*` as in a shell."""
    command, _, tail = command.partition(" | tail -n ")
    words = [
        found
        for word in shlex.split(command, comments=True)
        for found in (sorted(glob.glob(word)) if "*" in word else [word])
    ]
    assert words[0] == "resihp"
    target = words[words.index(">") + 1] if ">" in words else None
    status = main(words[1 : words.index(">")] if target else words[1:])
    printed = capsys.readouterr()
    output = (printed.out + printed.err).splitlines()
    if target is not None:
        Path(target).write_text(printed.out, encoding="utf-8")
        return status, []
    return status, output[-int(tail) :] if tail else output


def test_every_command_on_the_page_prints_what_is_shown(capsys, folder, request):
    """In the order of the page; where nothing is shown, it has to work."""
    page = PAGE
    for _, block in BLOCK.findall(PAGE):
        for command, expected in shown_in(block):
            status, output = run(command, capsys)
            assert status in (0, 1), command
            if expected and request.config.getoption("--update-golden"):
                now = [*output[: len(expected) - 1], MORE] if expected[-1] == MORE else output
                page = page.replace("\n".join([f"$ {command}", *expected]) + "\n",
                                    "\n".join([f"$ {command}", *now]) + "\n")  # fmt: skip
            elif expected and expected[-1] == MORE:
                assert output[: len(expected) - 1] == expected[:-1], command
            elif expected:
                assert output == expected, command
    if page != PAGE:
        FILE.write_text(page, encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".csv")])
def test_the_plans_on_the_page_are_right_and_in_canonical_form(name):
    """They verify without findings, but for the one that says it is broken."""
    parsed = parse(FILES[name])
    assert bool(verify(parsed)) == name.startswith("broken")
    assert format_text(parsed) == FILES[name]


def test_the_stages_of_the_places_on_the_page_are_as_said():
    """The comment behind each group line."""
    blocks = [block for _, block in BLOCK.findall(PAGE) if block.startswith("group ")]
    assert len(blocks) == 4
    for block in blocks:
        stages = placement_of(parse(SNIPPET_HEAD + block).plan).stages
        said = [re.findall(r"\d+", comment) for comment in re.findall(r"# stages? (.*)", block)]
        assert said == [[str(stage) for stage in stages[pp]] for pp in sorted(stages)]


def test_every_link_of_the_page_leads_somewhere():
    """To a heading of the page, or to a file."""
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]*)\)", PAGE):
        if target.startswith("#"):
            assert target[1:] in headings, target
        else:
            assert (FILE.parent / target).exists(), target


def test_the_table_of_codes_is_that_of_the_program():
    """Every code with its title, meaning and examples, no other, in order."""
    rows = re.findall(r"^\| `(RHP\d+)` \| (.*) \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    folder = "../resihp/ir/examples"
    assert rows == [
        (
            code,
            known.title,
            known.explanation,
            f"[bad]({folder}/{file_of(code, 'bad')}), [mended]({folder}/{file_of(code, 'good')})",
        )
        for code, known in CODES.items()
    ]


def test_the_table_of_lint_is_complete():
    """Every warning with its threshold."""
    rows = re.findall(r"^\| (RHP9\d\d) \|", PAGE, flags=re.MULTILINE)
    assert rows == [code for code in CODES if code.startswith("RHP9")]


def test_every_verb_on_plans_has_its_section():
    """Light verbs work on plans, but for those that look at runs."""
    sections = re.findall(r"^## `resihp (\w+)`$", PAGE, flags=re.MULTILINE)
    on_plans = {name for name, verb in VERBS.items() if verb.light} - {
        "audit",
        "checkpoints",
        "compare",
        "doctor",
        "save",
        "where",
        "explain",
    }
    assert set(sections) == on_plans
    assert "$ resihp explain" in PAGE


def test_every_verb_with_a_section_is_in_the_list_at_the_top():
    """Between the title and the first section."""
    top = PAGE.partition("\n## ")[0]
    sections = re.findall(r"^## `resihp (\w+)`$", PAGE, flags=re.MULTILINE)
    assert set(re.findall(r"\[`(\w+)`\]\(#resihp-\w+\)", top)) == set(sections)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_its_exit_status(verb, capsys):
    """At the end of its help."""
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "Exit status: 0 " in " ".join(capsys.readouterr().out.split())


def test_the_example_of_a_job_file_names_every_key():
    """In its section, as a setting or as a comment."""
    text = EXAMPLE.read_text(encoding="utf-8")
    _, *parts = re.split(r"^(?:# )?\[+(\w+)\]+", text, flags=re.MULTILINE)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    for section in fields(JobConfig):
        keys = fields(Injection if section.name == "inject" else section.type)
        said = re.findall(r"^(?:# )?(\w+) += ", bodies[section.name], flags=re.MULTILINE)
        assert {key.name for key in keys} <= set(said), section.name


def test_every_keyword_and_instruction_is_on_the_page():
    """Nothing of the language is left unexplained."""
    words = set(re.findall(r"[A-Za-z_]+", PAGE))
    assert {*STATEMENT_WORDS, *SOURCE_WORDS, *(op.mnemonic for op in Op)} <= words
