"""A judge's score as a rubric of OpenEnv."""
