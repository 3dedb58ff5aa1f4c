"""AUTOMATIC1111 (experimental): an option of its "SD Unet" setting."""
