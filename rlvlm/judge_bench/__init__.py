"""Measures a judge before it is trusted: items with known answers from simulators, and figures of its answers."""
