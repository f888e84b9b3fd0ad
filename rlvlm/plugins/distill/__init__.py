"""`rlvlm distill`: trains a pocket judge on another judge's labels."""
