"""SoftGym's own tasks, where the package is installed."""
