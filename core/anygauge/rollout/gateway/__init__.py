"""Gateway: OpenAI and Anthropic endpoints on any generator, which record every sampled token."""
