"""What happens before the first step: the preflight, places for processes, Ray, and the objects of the run."""
