"""What a run leaves to look at: plots, videos, the judge's page, the run card, the summary."""
