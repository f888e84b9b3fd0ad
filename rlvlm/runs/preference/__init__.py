"""Runs whose reward is learned from preferences, judged, or the env's own, with SAC and PEBBLE."""
