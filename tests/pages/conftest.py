"""Fixtures of a run's folder as a small run would leave it."""

from filled_run import config, filled, folder, make_records, make_scores  # noqa: F401 - fixtures
