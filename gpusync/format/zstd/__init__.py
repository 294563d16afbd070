"""Zstandard for what is nearly empty: an encoder of runs of zeros, and a decoder to the bytes that are not zero (RFC 8878)."""
