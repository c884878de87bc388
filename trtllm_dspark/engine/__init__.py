"""The embedded engine: a Hugging Face target, our drafter, our context, our verification. For checking and measuring."""
