"""Tasks x reward sources x seeds as Ray Tune trials, each of them an ordinary run in its own folder."""
