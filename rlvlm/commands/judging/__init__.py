"""The words about judges and their labels: served, fetched, reported on, distilled."""
