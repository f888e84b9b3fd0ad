"""People as judges and teachers: the page on which they answer, and the questions that wait for them."""
