"""The device side of an update: plan, read, decode, digest, list, commit; on CUDA or on the emulated runtime."""
