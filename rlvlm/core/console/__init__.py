"""What a person sees in the terminal while something runs, and the signals they send."""
