"""Networks that act, in plain torch. Used by algorithms."""
