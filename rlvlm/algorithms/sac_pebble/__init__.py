"""SAC with a reward source that may change while it learns (PEBBLE), as an RLlib algorithm."""
