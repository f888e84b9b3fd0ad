"""Results of runs, sweeps and judges: tables, statistics, figures and pages."""
