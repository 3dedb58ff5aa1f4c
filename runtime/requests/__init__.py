"""What a person asks for outside of sampling: engines to be built, space to be given back."""
