"""Judges over HTTP: a thin gateway on Ray Serve that trusts no caller. Started by experiments and by `serve deploy`."""
