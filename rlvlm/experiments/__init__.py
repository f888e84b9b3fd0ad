"""What is run and compared: config, recipes, training, reports. Used by the command line and notebooks."""
