"""A stand-in for MindSpeed: its names and signatures, and a little of what it does. Simulated."""
