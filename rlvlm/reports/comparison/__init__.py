"""The report of a sweep: who learns best by the true score, how sure that is, and what it costs."""
