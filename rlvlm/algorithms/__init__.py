"""When to sample, label, learn and sync: all RLlib code. Used by experiments."""
