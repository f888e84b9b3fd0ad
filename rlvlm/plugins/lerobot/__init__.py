"""SmolVLA in modules of our own, read from and written to folders in LeRobot's layout."""
