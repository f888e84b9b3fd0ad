"""Where judges part that others asked about the same episodes."""
