"""Images, video and sound in the train engine."""
