"""The folder of a run: what is written while it trains, and read afterwards."""
