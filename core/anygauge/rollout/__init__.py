"""Generation and reward."""
