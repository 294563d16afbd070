"""Mounts in inference engines. Only modules in here import an engine."""
