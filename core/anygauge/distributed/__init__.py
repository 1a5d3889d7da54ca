"""Process groups and rendezvous."""
