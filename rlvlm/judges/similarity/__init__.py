"""Judges that compare image and goal by likeness, without a question. Made by `judges.build`."""
