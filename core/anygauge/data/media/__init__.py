"""Images, video and sound: from rows to contents that every process of a run can read."""
