"""Callbacks for the trainers of others, which log what a watched judge does."""
