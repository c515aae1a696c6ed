"""The cheapest way to give each row a column of its own: the Hungarian method."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign"]


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row, all different, with the smallest sum of `costs[row][column]`.

    There are at least as many columns as rows. Rows are added one by one, each along the cheapest
    chain of rows that give their column up (Kuhn 1955, Munkres 1957): rows^2 * columns steps.
    """
    num_rows, num_columns = len(costs), len(costs[0]) if costs else 0
    assert num_rows <= num_columns or not num_rows, "fewer columns than rows"
    row_price, column_price = [0] * num_rows, [0] * num_columns
    row_of: list[int | None] = [None] * num_columns
    for added in range(num_rows):
        row, last = added, None
        slack: list[float] = [float("inf")] * num_columns
        before: list[int | None] = [None] * num_columns
        open_columns = dict.fromkeys(range(num_columns))
        closed: list[int] = []
        while row is not None:
            for column in open_columns:
                reduced = costs[row][column] - row_price[row] - column_price[column]
                if reduced < slack[column]:
                    slack[column], before[column] = reduced, last
            last = min(open_columns, key=slack.__getitem__)
            step = int(slack[last])
            row_price[added] += step
            for column in closed:
                holder = row_of[column]
                assert holder is not None
                row_price[holder] += step
                column_price[column] -= step
            for column in open_columns:
                slack[column] -= step
            del open_columns[last]
            closed.append(last)
            row = row_of[last]
        while last is not None:
            previous = before[last]
            row_of[last] = added if previous is None else row_of[previous]
            last = previous
    columns = [0] * num_rows
    for column, holder in enumerate(row_of):
        if holder is not None:
            columns[holder] = column
    return columns
