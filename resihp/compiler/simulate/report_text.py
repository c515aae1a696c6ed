"""The report of a simulation as a page of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resihp.compiler.simulate.report import GroupReport, LinkReport, Report
from resihp.compiler.words import spell_number, spell_rate, spell_seconds
from resihp.ir.verify.memory import readable_bytes

__all__ = ["render_report"]

_MOST_LINKS = 5
_HEAD = ("", "groups", "TP", "layers", "busy s", "bubble s", "utilisation", "peak")


def render_report(report: Report) -> str:
    """One row per position of the pipeline; where its groups differ, the least and the most."""
    by_position: dict[int, list[GroupReport]] = {}
    for group in report.groups:
        by_position.setdefault(group.pp, []).append(group)
    table = [_HEAD, *(_row(pp, groups) for pp, groups in sorted(by_position.items()))]
    busiest = max(report.groups, key=lambda group: group.busy_s)
    fullest = max(report.groups, key=lambda group: group.peak_bytes)
    room = "" if fullest.peak_bytes <= report.memory_bytes else ", TOO MUCH,"
    lines = [
        f"iteration {spell_seconds(report.iteration_s)}   "
        f"{spell_rate(report.tokens_per_s)} tokens/s   "
        f"utilisation {report.utilisation:.1%}   on {report.cluster}",
        f"compute ends after {spell_seconds(report.compute_s)}",
        "",
        *_aligned(table),
        "",
        f"busiest   {_place(busiest)}: {spell_seconds(busiest.busy_s)}, {busiest.utilisation:.1%}",
        f"memory    {_place(fullest)}: {readable_bytes(fullest.peak_bytes)} of "
        f"{readable_bytes(report.memory_bytes)}{room} at `{fullest.peak_at}`, "
        f"{spell_seconds(fullest.peak_at_s)} after the begin",
        *_links(report),
    ]
    return "\n".join(lines) + "\n"


def _row(pp: int, groups: Sequence[GroupReport]) -> tuple[str, ...]:
    degrees = sorted({group.tp for group in groups}, reverse=True)
    return (
        f"pp{pp}",
        str(len(groups)),
        ",".join(map(str, degrees)),
        groups[0].layers,
        _span([group.busy_s for group in groups], spell_number),
        _span([group.bubble_s for group in groups], spell_number),
        _span([group.utilisation for group in groups], "{:.1%}".format),
        _span([group.peak_bytes for group in groups], lambda size: readable_bytes(round(size))),
    )


def _span(values: Sequence[float], spell: Callable[[float], str]) -> str:
    least, most = spell(min(values)), spell(max(values))
    return least if least == most else f"{least} - {most}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in (0, 3) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _place(group: GroupReport) -> str:
    return f"{group.group} (rank{'s' if group.tp > 1 else ''} {group.ranks})"


def _links(report: Report) -> list[str]:
    if not report.links:
        return ["links     nothing goes from node to node"]
    lines = [
        f"node {link.source} -> {link.target}: {_carried(link)}, "
        f"{link.share:.1%} of its adapters' time"
        for link in report.links[:_MOST_LINKS]
    ]
    if len(report.links) > _MOST_LINKS:
        lines.append(f"and {len(report.links) - _MOST_LINKS} links more")
    return [("links     " if not number else " " * 10) + line for number, line in enumerate(lines)]


def _carried(link: LinkReport) -> str:
    parts = [(link.num_bytes, "of tensors"), (link.reduced_bytes, "to sum gradients")]
    return " and ".join(f"{readable_bytes(size)} {what}" for size, what in parts if size)
