"""The paged draft context: projected target features, kept as latents in pages."""
