"""All that draws a judge's answers and a run: charts, and pages of one file each. Needs neither torch nor Ray."""
