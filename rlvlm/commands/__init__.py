"""What a user meets on the terminal: the arguments, the live panel, and the box that explains a failure."""
