"""The samples that presets are judged by: made, timed and scored."""
