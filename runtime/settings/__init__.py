"""What a user chose, for one accelerated model and for all of Slipstream."""
