"""GLM-4.6V as transformers names it: GLM-4.1V, but for the text between the frames of a video."""
