"""A folder of safetensors as it lies on disk: its open files, its layout, its marker and its lock."""
