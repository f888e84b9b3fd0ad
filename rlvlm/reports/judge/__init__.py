"""`rlvlm judge-report`: how right, how sure, how consistent, how fast a judge's answers were, from runs and stores."""
