"""A reward learned from comparisons: queries, teachers, dataset, reward model, the loop. Used by algorithms."""
