"""An ensemble that learns from what was said: networks, objectives, the fit. Used by the loop and the subjects."""
