"""What a run leaves on disk and how it is written so that a crash, a full disk or a kill loses nothing."""
