"""Judges behind Ray Serve: deployments and the client that looks like a local judge. Used by experiments."""
