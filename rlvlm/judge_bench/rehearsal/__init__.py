"""The rehearsal: a search follows a judge, the same search follows the truth, and the difference is what it teaches."""
