"""What an episode is worth: success, or a judge's word on its video, once it has been tried on known episodes."""
