"""Weight transports to servers."""
