"""Tables of others: Parquet files and sequences of JSON objects, read within bounds."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlvlm.core.foreign import check_claim, open_inside, open_regular, read_text

DAMAGES = (
    *(OSError, KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, ArithmeticError),
    pa.ArrowException,
)
"""Errors that damaged data, or data of another form, may raise."""
_MAX_BYTES = 2**30  # limit for LeRobot's episodes.jsonl, whose lines contain statistics in some versions

_SPACE = re.compile(r"\s*")


def read_table(
    file: Path,
    is_wanted: Callable[[str], bool] = lambda _: True,
    filters: pc.Expression | None = None,
    root: Path | None = None,
) -> pa.Table:
    """Returns the wanted columns of a Parquet file, and the rows that pass the filters.

    Args:
        file: path of the file.
        is_wanted: whether a column is.
        filters: as for `pyarrow.parquet.read_table`.
        root: folder from elsewhere that the file belongs to; None: the user named the file.

    Raises:
        ValueError: its header claims more data than a file of its size may hold; nothing was read.
    """
    with open_regular(file) if root is None else open_inside(root, file) as stream:
        return _table(stream, is_wanted, filters)


def _table(stream: BinaryIO, is_wanted: Callable[[str], bool], filters: pc.Expression | None) -> pa.Table:
    about, file_bytes = pq.read_metadata(stream), os.fstat(stream.fileno()).st_size
    num_bytes = 0
    for group in map(about.row_group, range(about.num_row_groups)):
        # run-length encoding makes repeated values tiny in the file, so the expanded size is counted too
        num_values = sum(group.column(place).num_values for place in range(group.num_columns))
        num_bytes += max(group.total_byte_size, 4 * num_values, 8 * group.num_rows)
    check_claim(max(num_bytes, 8 * about.num_rows), file_bytes)
    columns = [name for name in about.schema.to_arrow_schema().names if is_wanted(name)]
    # texts and images shared by rows are kept once, as in the file: Arrow would copy them for every row
    leaves = [about.schema.column(place) for place in range(about.num_columns)]
    shared = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    table = pq.read_table(stream, columns=columns, filters=filters, read_dictionary=shared)
    check_claim(sum(_spread_bytes(chunk) for column in table.columns for chunk in column.chunks), file_bytes)
    return table


def _spread_bytes(array: pa.Array) -> int:
    """Returns the maximum bytes of an array's values, each expanded."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary])
        return len(array) * (pc.call_function("max", [lengths]).as_py() or 0)
    inner = array.flatten() if isinstance(array, pa.StructArray | pa.ListArray | pa.LargeListArray) else []
    return sum(map(_spread_bytes, inner)) if isinstance(inner, list) else _spread_bytes(inner)


def json_objects(file: Path, root: Path | None = None) -> Iterator[Any]:
    """Yields consecutive JSON objects, wherever the line breaks are; arguments as for `read_table`."""
    text = read_text(file, _MAX_BYTES, root)
    decoder, at = json.JSONDecoder(), 0
    while (at := _end_of_space(text, at)) < len(text):
        found, at = decoder.raw_decode(text, at)
        yield found


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
