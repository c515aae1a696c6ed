"""Who may import whom, and what is written nowhere: read off the source, not off a run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "resihp"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Parts of the package that a part may import, beside itself.
MAY_IMPORT = {
    "errors": {"ir"},  # the type of the findings that an error carries
    "wire": {"errors"},
    "checkpoint": {"errors"},
    "ir": {"errors"},
    "config": {"errors", "ir"},
    "compiler": {"errors", "ir"},
    "monitor": {"checkpoint", "compiler", "config", "errors", "ir", "wire"},
    "executor": {"checkpoint", "config", "errors", "ir", "wire"},
}
FORBIDDEN_MODULES = {"cPickle", "dill", "marshal", "multiprocessing", "pickle", "shelve"}
FORBIDDEN_CALLS = {
    "asyncio.create_subprocess_shell",
    "eval",
    "exec",
    "os.popen",
    "os.system",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "torch.load",
    "torch.save",
}


def part_of(path: Path) -> str:
    """The first name below `resihp`: a package or a module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            assert node.module is not None
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def data_as_code(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of every import and call that could run what it reads, or unpickle it."""
    for line, name in imports(tree):
        if name.split(".")[0] in FORBIDDEN_MODULES:
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                yield node.lineno, ast.unparse(node.func)
            for keyword in node.keywords:
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                    yield node.lineno, "shell=True"


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def each(condition: Callable[[str], bool] = lambda _: True) -> pytest.MarkDecorator:
    """One case per source file whose part fulfils `condition`."""
    paths = [path for path in SOURCES if condition(part_of(path))]
    return pytest.mark.parametrize(
        "path", paths, ids=[str(path.relative_to(PACKAGE)) for path in paths]
    )


# cli and the wiring of a job may import all.
@each(lambda part: part in MAY_IMPORT)
def test_a_part_imports_only_what_the_design_allows(path):
    """Data flows one way: ir, compiler, executor and monitor, then cli."""
    part = part_of(path)
    allowed = MAY_IMPORT[part] | {part}
    names = [(line, name.split(".")) for line, name in imports(parsed(path))]
    wrong = [
        (line, ".".join(name))
        for line, name in names
        if name[0] == "resihp" and len(name) > 1 and name[1] not in allowed
    ]
    assert wrong == []


@each(lambda part: part != "executor")
def test_torch_is_imported_only_by_the_executor(path):
    """Everything else works, and starts at once, without it."""
    assert [line for line, name in imports(parsed(path)) if name.split(".")[0] == "torch"] == []


@each()
def test_nothing_that_runs_data_as_code(path):
    """[S5] No pickle, nor its pipes, no eval, no shell: what comes from outside stays data."""
    assert list(data_as_code(parsed(path))) == []


def test_the_checks_see_what_they_forbid():
    """The readers above find what they look for."""
    tree = ast.parse("def f():\n    import torch.nn\n    from resihp.cli import main\n")
    assert list(imports(tree)) == [(2, "torch.nn"), (3, "resihp.cli"), (3, "resihp.cli.main")]
    for line in (
        "import pickle",
        "from multiprocessing.connection import Pipe",
        "import marshal as m",
        "eval(text)",
        "torch.load(path)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
    ):
        assert list(data_as_code(ast.parse(line))), line
    assert not list(data_as_code(ast.parse("subprocess.run(command, shell=False)")))
