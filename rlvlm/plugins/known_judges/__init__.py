"""Judges whose faults are known, by which a bench, a preflight or an alarm is tried."""
