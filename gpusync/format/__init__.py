"""The wire, byte by byte: index, header, frames, payloads, digests. Pure: parses, checks and encodes; no torch."""
