"""The command line: fast to answer, quiet about its insides, exact in its exit status."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import resihp
from resihp import cli
from resihp.errors import ConfigError, NoFeasiblePlan

HEAVY = {"asyncio", "json", "lark", "msgspec", "numpy", "torch", "uvloop"}


def modules_after(*argv: str) -> set[str]:
    """Top-level modules that a fresh `resihp ARGV` has loaded when it ends."""
    code = (
        "import sys\n"
        "from resihp.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True, timeout=30
    )
    return set(done.stderr.splitlines()[-1].split())


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """`python -m resihp ARGV` as a user would run it."""
    return subprocess.run(
        [sys.executable, "-m", "resihp", *argv], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["no-such-verb"], []])
def test_answers_about_itself_load_nothing_heavy(argv):
    """Help, version and wrong use need argparse and no more."""
    assert not modules_after(*argv) & HEAVY


@pytest.mark.parametrize(
    "verb", ["verify", "explain", "fmt", "show", "expand", "diff", "kill", "save"]
)
def test_the_help_of_a_light_verb_never_loads_torch(verb):
    """Plans are worked on without torch."""
    assert "torch" not in modules_after(verb, "--help")


def test_help_lists_every_verb():
    """`resihp --help` shows the table."""
    done = run("--help")
    assert done.returncode == 0
    assert all(re.search(rf"\n    {verb}\s", done.stdout) for verb in cli.VERBS)


def test_version_is_that_of_the_package():
    """`resihp --version` says which release this is."""
    assert run("--version").stdout == f"resihp {resihp.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such-verb"], ["--no-such-flag"]])
def test_wrong_use_exits_2_without_a_traceback(argv):
    """argparse words it; the status is the conventional one."""
    done = run(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "usage: resihp" in done.stderr


def test_options_are_not_abbreviated(tmp_path):
    """`where` has no --run, and does not take it for --runs-dir."""
    done = run("where", "--run", str(tmp_path))
    assert done.returncode == 2
    assert "unrecognized arguments: --run" in done.stderr


@pytest.mark.parametrize(
    "argv", [["where"], ["save"], ["audit"], ["inject", "kill"], ["kill", "--rank", "1"]]
)
def test_without_a_job_it_is_said_how_the_verb_names_one(tmp_path, argv):
    """As an argument of its own."""
    done = run(*argv, "--runs-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"no job runs under {tmp_path}: name the directory of its run with RUN, " in (
        done.stderr
    )


@pytest.mark.parametrize("argv", [["{}"], ["--run", "{}"]])
def test_kill_takes_a_run_as_the_other_verbs_do_and_as_it_did(tmp_path, argv):
    """As an argument, or with the option that it once needed."""
    done = run("kill", "--rank", "1", *(word.format(tmp_path) for word in argv))
    assert done.returncode == 2
    assert done.stderr == f"resihp: error: {tmp_path} is not the directory of a running job\n"


def test_kill_takes_one_run():
    """Two of them may be two."""
    done = run("kill", "a", "--run", "b", "--rank", "1")
    assert done.returncode == 2
    assert "leave one of the two out" in done.stderr


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_of_the_table_is_there(verb):
    """Each module declares arguments and runs."""
    module = importlib.import_module(cli.VERBS[verb].module)
    assert callable(module.add_arguments)
    assert callable(module.run)


def verb_that(monkeypatch, action):
    """Make `verify` do `action`: only what happens around a verb is looked at here."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: action())
    monkeypatch.setitem(sys.modules, cli.VERBS["verify"].module, module)


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("tp = 3: no"), 2), (NoFeasiblePlan("tp = 3: no"), 4)]
)
def test_an_expected_error_is_one_line_and_its_own_status(monkeypatch, capsys, error, status):
    """A ResihpError is shown, not traced."""

    def fail():
        raise error

    verb_that(monkeypatch, fail)
    assert cli.main(["verify"]) == status
    assert capsys.readouterr().err == "resihp: error: tp = 3: no\n"


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    """Whatever is not a ResihpError passes through."""
    verb_that(monkeypatch, lambda: [][0])
    with pytest.raises(IndexError):
        cli.main(["verify"])


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    """Ctrl-C is no error of the program."""

    def interrupt():
        raise KeyboardInterrupt

    verb_that(monkeypatch, interrupt)
    assert cli.main(["verify"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_with_141():
    """`resihp … | head` prints no traceback."""
    code = (
        "import sys, types\n"
        "from resihp import cli\n"
        "def run(args):\n"
        "    for _ in range(100_000):\n"
        "        print('line')\n"
        "    return 0\n"
        "fake = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)\n"
        "sys.modules[cli.VERBS['verify'].module] = fake\n"
        "sys.exit(cli.main(['verify']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(30) == 141
    assert errors == ""


def test_every_public_name_is_there():
    """`resihp.__all__` keeps its promise."""
    assert resihp.__all__ == sorted(resihp.__all__)
    for name in resihp.__all__:
        assert getattr(resihp, name) is not None
        assert name in dir(resihp)


def test_an_unknown_public_name_is_an_attribute_error():
    """PEP 562 does not hide misspellings."""
    with pytest.raises(AttributeError, match="no attribute 'parze'"):
        resihp.parze  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
