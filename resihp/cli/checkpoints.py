"""`resihp checkpoints`: saved versions of a run or in a directory, and whether they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from resihp.cli.runs import add_runs_dir, newest_runs

if TYPE_CHECKING:
    import argparse

    from resihp.checkpoint.versions import Listed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        metavar="RUN|DIR",
        help="directory of a run, or of versions (default: the newest run in --runs-dir)",
    )
    add_runs_dir(parser)
    parser.add_argument(
        "--verify", action="store_true", help="read all bytes and compare their hashes"
    )
    parser.epilog = (
        "Newest first. A version without its marker is one that is being written, or was torn. "
        "Exit status: 0 there is a complete one and none is refused, 1 otherwise, 2 wrong use."
    )


def run(args: argparse.Namespace) -> int:
    """List the versions; with --verify, hash all of them."""
    from resihp.checkpoint.versions import list_versions

    directory = _directory(args)
    found = list_versions(directory)
    print(directory)
    if not found:
        print("  no versions")
        return 1
    troubles = 0
    for each in found:
        trouble = each.trouble or (_damage(directory, each) if args.verify else "")
        troubles += bool(trouble)
        print(f"  {each.name}  {_state(each, trouble, verified=args.verify)}")
    return 0 if not troubles and any(each.manifest is not None for each in found) else 1


def _directory(args: argparse.Namespace) -> Path:
    """Where the versions are. Raises UserError where there is no such directory."""
    from resihp.errors import UserError

    named: Path | None = args.directory
    given = _newest_run(args.runs_dir) if named is None else named
    if not given.is_dir():
        raise UserError(f"{given} is no directory")
    return _of_run(given) if (given / "job.toml").is_file() else given.absolute()


def _newest_run(runs_dir: Path) -> Path:
    """Raises UserError where there is none."""
    from resihp.errors import UserError

    runs = newest_runs(runs_dir)
    if not runs:
        raise UserError(
            f"no run in {runs_dir}: name the directory of a run or of versions, or say where runs "
            "are with --runs-dir"
        )
    return runs[-1]


def _of_run(run: Path) -> Path:
    from resihp.config import load
    from resihp.monitor.checkpoints import versions_of

    return versions_of(load(run / "job.toml"), run)


def _damage(directory: Path, each: Listed) -> str:
    """Why the bytes of a version are not those that were written; '' where they are."""
    from resihp.checkpoint.disk import open_folder
    from resihp.checkpoint.versions import check_data, read_manifest, read_parts
    from resihp.errors import CheckpointRefused

    if each.manifest is None:
        return ""
    try:
        with open_folder(directory) as parent, parent.inside(each.name) as folder:
            for rank, part in read_parts(folder, read_manifest(folder)).items():
                check_data(folder, rank, part)
    except CheckpointRefused as error:
        return str(error)
    except OSError as error:
        return f"{directory / each.name}: {error.strerror}"
    return ""


def _state(each: Listed, trouble: str, *, verified: bool) -> str:
    if trouble:
        return f"REFUSED: {trouble}"
    manifest = each.manifest
    if manifest is None:
        return "not complete"
    loss = "" if manifest.loss is None else f"  loss {manifest.loss:.4f}"
    checked = "  all hashes are right" if verified else ""
    size = manifest.data_bytes / 2**20
    parts = f"{len(manifest.parts)} parts"
    return f"complete  step {manifest.step}{loss}  {size:.1f} MiB in {parts}{checked}"
