"""Judges and policies behind Ray Serve: deployments, and clients with the interface of a local judge or policy."""
