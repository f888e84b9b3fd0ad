"""What others take from a bench: entries, the page of judges, and suites of what fooled judges in runs."""
