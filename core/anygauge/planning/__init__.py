"""Plan of a run before it starts: layout, batches, memory, disk and time, by arithmetic alone."""
