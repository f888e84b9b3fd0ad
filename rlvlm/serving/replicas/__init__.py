"""What runs inside a replica's process: the judge, its batches, its watchdog and its share of a GPU."""
