"""What a live model is: its layers, the weights that they hold, the code that they run, and what others changed."""
