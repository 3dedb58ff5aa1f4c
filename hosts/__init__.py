"""All that knows how a host works inside."""
