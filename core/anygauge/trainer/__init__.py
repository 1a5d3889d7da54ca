"""The loop, its roles and the processes they run in."""
