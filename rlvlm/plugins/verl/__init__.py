"""A judge's score as verl's custom reward function."""
