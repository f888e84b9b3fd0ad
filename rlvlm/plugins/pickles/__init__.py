"""Label files of the reference implementation, which are pickles: `rlvlm labels import`."""
