"""Measures a judge before it is trusted: items with known answers out of the simulators, and what their answers say."""
