"""At which steps of a sampling run the model is computed, and what is reused in the rest."""
