"""A reward learned from answers: questions, who answers, the model fitted to them, the loop. Used by algorithms."""
