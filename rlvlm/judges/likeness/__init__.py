"""Judges that compare picture and goal by likeness, without a question. Made by `judges.build`."""
