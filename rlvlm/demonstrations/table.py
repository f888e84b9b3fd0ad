"""A folder of demonstrations as one Parquet file, one row per step: for DuckDB, pandas, or a colleague."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlvlm.core.disk import replacing
from rlvlm.demonstrations.folder import DemonstrationFolder

SCHEMA = pa.schema(
    [
        ("episode", pa.string()),
        ("task", pa.string()),
        ("seed", pa.int64()),
        ("player", pa.string()),
        ("goal", pa.string()),
        ("step", pa.int32()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("action", pa.string()),
        ("is_noise", pa.bool_()),
        ("env_reward", pa.float64()),
        ("success", pa.bool_()),
        ("progress", pa.float64()),
        ("quality", pa.float64()),
        ("pictures", pa.list_(pa.string())),
        ("env_return", pa.float64()),
        ("episode_success", pa.bool_()),
    ]
)
"""Images are named by digest, as in the folder. `action` is null where the reply could not be read."""


def export_parquet(folder: DemonstrationFolder, file: Path) -> int:
    """Writes every step of every episode and returns how many; an episode in chunks is one row. Whole or not at all.

    Raises:
        OSError: the disk refused.
    """
    count = 0
    with replacing(file) as partial, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for record in folder.episodes():
            episode = {name: getattr(record, name) for name in ("task", "seed", "player", "goal", "env_return")}
            episode |= {"episode": record.id, "episode_success": record.success}
            rows = [
                episode
                | {name: getattr(step, name) for name in _STEP_COLUMNS}
                | {"step": place, "text": _utf8(step.text)}
                for place, step in enumerate(record.steps)
            ]
            writer.write_table(pa.Table.from_pylist(rows or [episode], SCHEMA))
            count += len(rows) or 1
    return count


_STEP_COLUMNS = ("prompt", "action", "is_noise", "env_reward", "success", "progress", "quality", "pictures")


def _utf8(text: str) -> str:
    """Parquet's text is UTF-8; a player's need not be."""
    return text.encode(errors="replace").decode()
