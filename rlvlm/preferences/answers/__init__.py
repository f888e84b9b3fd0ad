"""Who answers, and how sessions reach them: judges, teachers who know the truth, a coin. Used by the loop."""
