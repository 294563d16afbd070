"""The HTTP server of ``gpusync serve``, and its metrics."""
