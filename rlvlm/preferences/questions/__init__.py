"""What is asked: pairs that are compared or frames that are scored, and which of many. Used by the loop."""
