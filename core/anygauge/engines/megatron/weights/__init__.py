"""Weight conversion between Hugging Face tensors and a rank's tensors."""
